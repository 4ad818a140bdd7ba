"""Hints for mistyped names: the nearest one if any is near, a path among the files of its folder, else nothing."""

from trl_fsdp_qlora.errors import PrefixSharingError, UserError, did_you_mean, mistyped_path


def test_the_nearest_name_is_named_and_no_other():
    names = ["learning_rate", "num_generations", "max_steps"]
    assert did_you_mean("learning_rat", names) == "; did you mean 'learning_rate'?"
    assert did_you_mean("max_step", names) == "; did you mean 'max_steps'?"
    assert did_you_mean("something", names) == "" == did_you_mean("x", [])


def test_a_path_is_compared_with_the_files_of_its_folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "other.txt").write_text("")
    assert mistyped_path(tmp_path / "rows.jsnl") == "; did you mean 'rows.jsonl'?"
    assert mistyped_path(tmp_path / "rows.jsonl") == ""  # it is there
    assert mistyped_path(tmp_path / "absent" / "rows.jsonl") == ""  # its folder is not
    assert mistyped_path(tmp_path / "quite_another") == ""


def test_each_error_that_a_user_can_fix_is_a_value_error():
    """Scripts that catch TRL's `ValueError` catch them, too."""
    assert issubclass(UserError, ValueError) and issubclass(PrefixSharingError, UserError)
