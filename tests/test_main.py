import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import trl_fsdp_qlora
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.run.accelerate_configs import names

ROOT = Path(__file__).parents[1]


def test_configs_by_name(capsys):
    main(["config", "ddp_cpu"])
    path = Path(capsys.readouterr().out.strip())
    assert yaml.safe_load(path.read_text())["num_processes"] == 2
    main(["config"])
    assert {"cpu", "ddp", "ddp_cpu", "single_gpu"} <= set(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="no accelerate config named 'tpu'; there are cpu"):
        main(["config", "tpu"])


@pytest.mark.processes
def test_version_by_either_name(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said == f"trl-fsdp-qlora {trl_fsdp_qlora.__version__}\n"
    module = [sys.executable, "-m", "trl_fsdp_qlora", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True, cwd=ROOT).stdout == said


def _readme_for_pypi(text, repository):
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.readme_for_pypi(text, repository)


def test_readme_links_on_pypi():
    text = "[page](docs/runs.md#a) ![curve](docs/a.png) [TRL](https://x.org/y) [below](#below)"
    assert _readme_for_pypi(text, None) == "page  [TRL](https://x.org/y) [below](#below)"
    assert _readme_for_pypi(text, "https://host/owner/name/") == (
        "[page](https://host/owner/name/blob/main/docs/runs.md#a) "
        "![curve](https://host/owner/name/raw/main/docs/a.png) [TRL](https://x.org/y) [below](#below)"
    )


@pytest.mark.processes
@pytest.mark.slow
def test_configs_come_with_the_wheel(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    wheel = next(tmp_path.glob("*.whl"))
    # --ignore-installed, or pip removes the package that is being tested from its own environment
    prefix = ["--ignore-installed", "--prefix", str(tmp_path / "prefix")]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *prefix, str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=240)
    site = next((tmp_path / "prefix").rglob("site-packages"))
    code = "from trl_fsdp_qlora.__main__ import main; main(['config', 'ddp_cpu'])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": ""},
    )
    path = Path(run.stdout.strip())
    assert tmp_path in path.parents
    assert path.read_text() == (ROOT / "accelerate_configs" / "ddp_cpu.yaml").read_text()
    inside = zipfile.ZipFile(wheel)
    assert not [name for name in inside.namelist() if name.startswith(("tests/", "recipes/"))]
    assert "trl_fsdp_qlora/py.typed" in inside.namelist()
    metadata = inside.read(next(name for name in inside.namelist() if name.endswith("/METADATA"))).decode()
    assert "Project-URL: Package, https://pypi.org/project/trl-fsdp-qlora/" in metadata
    assert "# trl_fsdp_qlora" in metadata  # the README, as PyPI shows it
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata)  # and no link in it that only works in a checkout
    assert names()
