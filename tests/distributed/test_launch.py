import pytest

from .launch import TORCHRUN, run_code


@pytest.mark.processes
def test_a_script_is_no_rank_where_the_tests_process_is_one(tmp_path, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    run = run_code("import os; print(sorted(os.environ))", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert [name for name in TORCHRUN if f"'{name}'" in run.stdout] == []
