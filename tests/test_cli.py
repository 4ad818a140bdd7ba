import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from trl_fsdp_qlora import cli
from trl_fsdp_qlora.run.accelerate_configs import names

ROOT = Path(__file__).parents[1]


def test_configs_by_name(capsys):
    cli.main(["config", "ddp_cpu"])
    path = Path(capsys.readouterr().out.strip())
    assert yaml.safe_load(path.read_text())["num_processes"] == 2
    cli.main(["config"])
    assert {"cpu", "ddp", "ddp_cpu", "single_gpu"} <= set(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="no accelerate config named 'tpu'; there are cpu"):
        cli.main(["config", "tpu"])


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
    code = "from trl_fsdp_qlora import cli; cli.main(['config', 'ddp_cpu'])"
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
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(("tests/", "recipes/"))]
    assert names()
