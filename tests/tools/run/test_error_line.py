"""What ends a command or a recipe is one line, whatever it is."""

import errno
import os
import sys

import pytest
import safetensors
import torch

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.cli import error_line
from trl_fsdp_qlora.tools.cli.one_line import in_one_line

FULL = "the disk is full: free some space or set another output_dir"


@pytest.fixture
def ended(monkeypatch, capsys, tmp_path):
    """Exit status and standard error of a command that is ended by an exception; its traceback goes below
    `tmp_path`.
    """
    monkeypatch.setattr(sys, "argv", [__file__])  # the script itself: not a place that its user wrote
    monkeypatch.setattr(error_line.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)

    def end(error):
        with pytest.raises(SystemExit) as end, in_one_line():
            raise error
        return end.value.code, capsys.readouterr().err

    return end


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("line one\nline two"), "ValueError: line one line two; the traceback is in "),
        (AssertionError(), "AssertionError; the traceback is in "),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/x.bin"), FULL),
        (safetensors.SafetensorError("I/O error: No space left on device (os error 28)"), FULL),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), FULL),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "lower per_device_train_batch_size"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "{offload: true}"),
        (RuntimeError("CUDA error: out of memory"), "pinned host memory"),
        (ModuleNotFoundError("No module named 'wandb.sdk'", name="wandb.sdk"), "pip install wandb"),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1662"), "another process"),
        (RuntimeError("x" * 5000), "x …; the traceback is in "),
    ],
)
def test_what_and_its_remedy_in_one_line_and_the_traceback_in_a_file(ended, tmp_path, error, message):
    status, text = ended(error)
    assert status == 1 and text.startswith(f"error: {type(error).__name__}") and message in text
    assert text.count("\n") == 1 and len(text) < 1000
    (file,) = tmp_path.iterdir()
    assert str(file) in text and file.read_text().startswith("Traceback (most recent call last)")


def test_a_full_disk_below_another_error_is_found_and_a_users_error_has_no_traceback(ended, tmp_path):
    error = RuntimeError("saving failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert FULL in ended(error)[1]
    for file in tmp_path.iterdir():
        file.unlink()
    assert ended(UserError("beta=x is\nno number")) == (2, "error: beta=x is no number\n")
    assert list(tmp_path.iterdir()) == []


def test_no_secret_is_printed_or_kept(ended, tmp_path):
    token = "hf_" + "a" * 30
    _, text = ended(RuntimeError(f"401 for https://me:{token}@hub with {token}"))
    (file,) = tmp_path.iterdir()
    assert token not in text + file.read_text()


def test_without_room_for_the_file_the_traceback_is_printed(ended, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(error_line.tempfile, "mkstemp", refuse)
    status, text = ended(OSError(errno.ENOSPC, "No space left on device"))
    assert status == 1 and "Traceback" in text and FULL in text.splitlines()[-1]


def test_asked_for_it_is_a_traceback(monkeypatch):
    monkeypatch.setenv("TRL_FSDP_QLORA_TRACEBACK", "1")
    for error in (UserError("x"), KeyError("x")):
        with pytest.raises(type(error)), in_one_line():
            raise error
