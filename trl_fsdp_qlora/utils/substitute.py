"""`Substitute`: an object in the place of another one, with other values under some names.

A method that gets it as its `self` finds these values; the object itself stays as it is. Methods that are looked up in
a substitute run on the original, so they, and everything else that holds the original, find the original's values.
"""


class Substitute:
    """An object in the place of `original`, an instance of the same class to `isinstance` and `super`.

    Every other name is read from `original`, and set on it.

    Args:
        original: any object.
        **values: values in the place of those that `original` has.

    Raises:
        AttributeError: `original` has no attribute of a name.

    Example:

        def _calculate_rewards(self, *args):
            checked = Substitute(self, reward_funcs=self.checked_functions)
            return super(MyTrainer, checked)._calculate_rewards(*args)
    """

    _original: object

    def __init__(self, original: object, /, **values: object):
        for name in values:
            getattr(original, name)  # raises
        vars(self).update(values, _original=original)

    @property  # type: ignore[misc]  # of `object` it can be set
    def __class__(self) -> type:
        return self._original.__class__

    def __getattr__(self, name: str) -> object:  # called for names that the substitute lacks
        # Not `self._original`, which would look for itself without end in a copy that is not filled yet.
        return getattr(object.__getattribute__(self, "_original"), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._original, name, value)
