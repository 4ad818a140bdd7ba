"""Changes to a reward, each of which has to change its key, and changes of nothing, which must not.

A probe is the user's `train.py` with `reward` in it, and other files of theirs; a change is a text and what it becomes.
"""

import importlib
import os
import subprocess
import sys
import textwrap

import pytest

from trl_fsdp_qlora.a_star_po.canonical import FingerprintError
from trl_fsdp_qlora.a_star_po.fingerprint import reward_fingerprint

CALLS = "def reward(completions, **kwargs):\n    return [float({}) for c in completions]\n"
MODULES = ("train", "helper", "deeper", "package", "package.inner", "package.other")

# name: (files, file to change, old text, new text); CALLS makes the reward from an expression of `c`.
CHANGES = {
    "the body": ({"train": CALLS.format("len(c) > 2")}, "train", "> 2", "> 3"),
    "a helper": ({"train": "def f(c): return len(c)\n" + CALLS.format("f(c)")}, "train", "len(c)\n", "-len(c)\n"),
    "a module's constant": ({"train": "SCALE = 2\n" + CALLS.format("SCALE")}, "train", "= 2", "= 3"),
    "a pattern": ({"train": "import re\nP = re.compile('a+')\n" + CALLS.format("bool(P.match(c))")}, "train", "a+", "b+"),
    "an import inside the body": (
        {"train": CALLS.format("f(c)").replace("    return", "    from helper import f\n    return"),
         "helper": "def f(c): return 1\n"}, "helper", "return 1", "return 2"),
    "a module imported inside the body": (
        {"train": CALLS.format("helper.f(c)").replace("    return", "    import helper\n    return"),
         "helper": "def f(c): return 1\n"}, "helper", "return 1", "return 2"),
    "a relative import inside the body of a package": (
        {"train": "from package.inner import f\n" + CALLS.format("f(c)"), "package/__init__": "",
         "package/inner": "def f(c):\n    from .other import g\n    return g(c)\n",
         "package/other": "def g(c): return 1\n"}, "package/other", "return 1", "return 2"),
    "a submodule taken from its package inside the body": (
        {"train": CALLS.format("inner.f(c)").replace("    return", "    from package import inner\n    return"),
         "package/__init__": "", "package/inner": "def f(c): return 1\n"}, "package/inner", "return 1", "return 2"),
    "a module's own import": (
        {"train": "import helper\n" + CALLS.format("helper.f(c)"), "helper": "from deeper import g\nf = g\n",
         "deeper": "def g(c): return 1\n"}, "deeper", "return 1", "return 2"),
    "a module behind a module": (
        {"train": "import helper\n" + CALLS.format("helper.deeper.g(c)"), "helper": "import deeper\n",
         "deeper": "def g(c): return K\nK = 1\n"}, "deeper", "K = 1", "K = 2"),
    "a name that is looked up": (
        {"train": "import helper\n" + CALLS.format("getattr(helper, 'f' + 'g')"), "helper": "fg = 1\n"},
        "helper", "fg = 1", "fg = 2"),
    "a module that is passed on": (
        {"train": "import helper\ndef f(m): return m.X\n" + CALLS.format("f(helper)"), "helper": "X = 1\n"},
        "helper", "X = 1", "X = 2"),
    "a property": (
        {"train": "class A:\n    @property\n    def x(self): return 1\nA1 = A()\n" + CALLS.format("A1.x")},
        "train", "return 1", "return 2"),
    "a static method": (
        {"train": "class A:\n    @staticmethod\n    def x(): return 1\n" + CALLS.format("A.x()")},
        "train", "return 1", "return 2"),
    "a class's attribute": ({"train": "class A:\n    x = 1\n" + CALLS.format("A.x")}, "train", "x = 1", "x = 2"),
    "a base class": (
        {"train": "from helper import B\nclass A(B): pass\n" + CALLS.format("A().x()"),
         "helper": "class B:\n    def x(self): return 1\n"}, "helper", "return 1", "return 2"),
    "slots": (
        {"train": "class A:\n    __slots__ = ('x',)\nA1 = A()\nA1.x = 1\n" + CALLS.format("A1.x")}, "train", "= 1\n", "= 2\n"),
    "a NamedTuple": (
        {"train": "from typing import NamedTuple\nclass A(NamedTuple):\n    x: int\nA1 = A(1)\n" + CALLS.format("A1.x")},
        "train", "A(1)", "A(2)"),
    "a NamedTuple's method": (
        {"train": "from typing import NamedTuple\nclass A(NamedTuple):\n    x: int\n    def y(self): return 1\nA1 = A(1)\n"
         + CALLS.format("A1.y()")}, "train", "return 1", "return 2"),
    "a subclass of dict": (
        {"train": "class D(dict): pass\nD1 = D()\nD1.x = 1\n" + CALLS.format("D1.x")}, "train", "x = 1", "x = 2"),
    "what a subclass of dict does": (
        {"train": "class D(dict):\n    def __missing__(self, k): return 1\nD1 = D()\n" + CALLS.format("D1[c]")},
        "train", "return 1", "return 2"),
    "a dataclass's default": (
        {"train": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n" + CALLS.format("A().x")},
        "train", "int = 1", "int = 2"),
    "an enumeration": (
        {"train": "import enum\nclass E(enum.Enum):\n    A = 1\n" + CALLS.format("E.A.value")}, "train", "A = 1", "A = 2"),
    "what was set on a module at run time": (
        {"train": "import helper\nhelper.X = 1\n" + CALLS.format("helper.X"), "helper": "X = 0\n"},
        "train", "helper.X = 1", "helper.X = 2"),
    "what was set on a class at run time": (
        {"train": "class A: pass\nA.x = 1\n" + CALLS.format("A.x")}, "train", "x = 1", "x = 2"),
    "what was set on a function at run time": (
        {"train": CALLS.format("reward.x") + "reward.x = 1\n"}, "train", "x = 1", "x = 2"),
    "what was set on a library at run time": (
        {"train": "import math\nmath.limit = 1\n" + CALLS.format("math.limit")}, "train", "limit = 1", "limit = 2"),
    "one of two lambdas on one line": (
        {"train": "F, G = lambda c: 1, lambda c: 2\nH = F\n" + CALLS.format("H(c)")}, "train", "H = F", "H = G"),
    "a closure": (
        {"train": "def make(x):\n    def reward(completions, **kwargs): return [x for _ in completions]\n"
         "    return reward\nreward = make(1)\n"}, "train", "make(1)", "make(2)"),
    "a default": (
        {"train": "def f(c, x=1): return x\n" + CALLS.format("f(c)")}, "train", "x=1", "x=2"),
    "a keyword default": (
        {"train": "def f(c, *, x=1): return x\n" + CALLS.format("f(c)")}, "train", "x=1", "x=2"),
    "a partial": (
        {"train": "import functools\ndef f(completions, x, **k): return [x for _ in completions]\n"
         "reward = functools.partial(f, x=1)\n"}, "train", "x=1", "x=2"),
    "a callable's state": (
        {"train": "class A:\n    def __init__(self, x): self.x = x\n    def __call__(self, completions, **kwargs): "
         "return [self.x for _ in completions]\nreward = A(1)\n"}, "train", "A(1)", "A(2)"),
    "a bound method's object": (
        {"train": "class A:\n    def __init__(self, x): self.x = x\n    def f(self, completions, **kwargs): "
         "return [self.x for _ in completions]\nreward = A(1).f\n"}, "train", "A(1)", "A(2)"),
    "a state that its class does not pickle": (
        {"train": "class A:\n    def __init__(self, x): self.x = x\n    def __getstate__(self): return {}\n"
         "    def __call__(self, completions, **kwargs): return [self.x for _ in completions]\nreward = A(1)\n"},
        "train", "A(1)", "A(2)"),
    "a decorator": (
        {"train": "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*a, **k): return [2 * r for r in f(*a, **k)]\n"
         "    return g\n@twice\n" + CALLS.format("1")}, "train", "2 * r", "3 * r"),
    "a function under a library's decorator": (
        {"train": "import functools\n@functools.lru_cache\ndef f(c): return 1\n" + CALLS.format("f(c)")},
        "train", "return 1", "return 2"),
    "a function under a library's context manager": (
        {"train": "import contextlib\n@contextlib.contextmanager\ndef f(): yield 1\ndef g():\n    with f() as x: return x\n"
         + CALLS.format("g()")}, "train", "yield 1", "yield 2"),
    "a cached property": (
        {"train": "import functools\nclass A:\n    @functools.cached_property\n    def x(self): return 1\nA1 = A()\n"
         + CALLS.format("A1.x")}, "train", "return 1", "return 2"),
    "a nested function's global": (
        {"train": "X = 1\ndef f(c):\n    def g(): return X\n    return g()\n" + CALLS.format("f(c)")}, "train", "X = 1", "X = 2"),
    "an argument's order": (
        {"train": "from collections import OrderedDict\nD = OrderedDict([('a', 1), ('b', 2)])\n" + CALLS.format("next(iter(D)) == 'a'")},
        "train", "[('a', 1), ('b', 2)]", "[('b', 2), ('a', 1)]"),
    "made by exec": (
        {"train": "N = {}\nexec('def f(c): return 1', N)\nf = N['f']\n" + CALLS.format("f(c)")}, "train", "return 1", "return 2"),
    "one and True": ({"train": "K = 1\n" + CALLS.format("str(K) == c")}, "train", "K = 1", "K = True"),
}  # fmt: skip


@pytest.fixture
def key(tmp_path, monkeypatch):
    """`key(files, folder="a")`: the fingerprint of `train.reward`, imported anew from freshly written files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget():
        for name in MODULES:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def make(files, folder="a"):
        write(tmp_path / folder, files)
        forget()
        sys.path.insert(0, str(tmp_path / folder))
        try:
            return reward_fingerprint([importlib.import_module("train").reward], ["reward"])
        finally:
            sys.path.remove(str(tmp_path / folder))

    yield make
    forget()
    import math

    vars(math).pop("limit", None)


def write(folder, files):
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_changes_the_key(key, name):
    files, where, old, new = CHANGES[name]
    assert files[where].count(old) == 1, "the probe itself"
    before = key(files)
    assert key(files) == before
    assert key({**files, where: files[where].replace(old, new)}) != before


WHOLE = {
    "train": "import functools, logging, re, threading\nimport helper\nfrom package.inner import f\n"
    "LOCK, LOG = threading.Lock(), logging.getLogger('x')\nWORDS = {'a', 'b', 'c', 'd', ('e', 'f')}\n"
    "UNUSED = 1\nTABLE = {'x': 1, 'y': [2, 3.5, None]}\n"
    + CALLS.format("helper.g(c) + f(c) + len(WORDS) + TABLE['x'] + (lambda x: x)(1) + bool(LOCK and LOG)"),
    "helper": "def g(c):\n    return c in {'one', 'two', 'three'}\n",
    "package/__init__": "",
    "package/inner": "class A:\n    def __init__(self): self.words = frozenset({'p', 'q', 'r'})\nf = A().words.__contains__\n",
    "package/other": "X = 1\n",
}


@pytest.mark.parametrize(
    "change",
    [
        ("helper", "    return", "    # why\n\n    return"),
        ("helper", "def g", "\n\n\ndef g"),
        ("train", "UNUSED = 1", "UNUSED = 2"),
        ("package/other", "X = 1", "X = 2"),
        ("train", "import functools", "import package.other, os.path, functools"),
    ],
    ids=["a comment", "lines", "a constant that nothing reads", "a module that nothing reads", "further imports"],
)
def test_what_changes_nothing_keeps_the_key(key, change):
    where, old, new = change
    before = key(WHOLE)
    assert key({**WHOLE, where: WHOLE[where].replace(old, new, 1)}) == before


def test_a_moved_folder_keeps_the_key(key):
    assert key(WHOLE, "a") == key(WHOLE, "b/c")


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_library_of_another_environment_counts_by_its_version(key, monkeypatch, tmp_path, folder):
    """One that `site.addsitedir` added, say; what it holds may be nothing that can be followed."""
    monkeypatch.syspath_prepend(str(tmp_path / "env" / "lib" / folder))

    def of(source):
        library = f"env/lib/{folder}/deeper"
        return key({"train": "import deeper\n" + CALLS.format("deeper.f(c)"), f"../{library}": source})

    source = "__version__ = '1.0'\nSTATE = (x for x in range(3))\ndef f(c):\n    return next(STATE)\n"
    first = of(source)
    assert of(source.replace("next(STATE)", "-next(STATE)")) == first
    assert of(source.replace("1.0", "1.1")) != first


@pytest.mark.processes
def test_other_processes_give_the_same_key(tmp_path, key):
    write(tmp_path / "p", WHOLE)
    code = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from trl_fsdp_qlora.a_star_po.fingerprint import reward_fingerprint
        if sys.argv[2] == "other order":
            import package.other, helper
        import train
        if sys.argv[2] == "called before":
            train.reward(["one"])
        print(reward_fingerprint([train.reward], ["reward"])[0][1])
        """
    )
    keys = set()
    for seed, order in (("1", "other order"), ("2", "called before")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code, str(tmp_path / "p"), order]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        keys.add(out.stdout.strip())
    assert keys == {key(WHOLE)[0][1]}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ("(x for x in range(3))", "generator"),
        ("open(__file__)", "TextIOWrapper"),
        ("__import__('socket').socket()", "socket"),
        ("__import__('sqlite3').connect(':memory:')", "sqlite3.Connection"),
        ("__import__('ssl').create_default_context()", "SSLContext"),
    ],
)
def test_what_cannot_be_followed_is_named_with_the_field_to_set(key, state, named):
    with pytest.raises(FingerprintError, match=rf"{named}.*set value_reward_version"):
        key({"train": f"STATE = {state}\n" + CALLS.format("bool(STATE)")})
