"""Calls that may execute their input; each one in the product has a reason here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("proto", "router", "worker", "cluster", "tools", "helm", "deploy")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)

#: Modules that deserialise objects, render templates or run code.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
MODULES |= {"jsonpickle", "pickletools", "copyreg", "jinja2", "code", "codeop", "runpy", "zmq"}
MODULES |= {"multiprocessing.connection", "multiprocessing.managers", "xmlrpc"}
#: Built-in functions that execute text.
BUILTINS = {"eval", "exec", "compile", "__import__"}
#: Unsafe functions of other modules.
CALLS = {"torch.load", "torch.save", "torch.package", "torch.hub.load", "numpy.load", "np.load"}
CALLS |= {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.full_load_all"}
CALLS |= {"os.system", "os.popen", "torch.distributed.broadcast_object_list", "pandas.read_pickle"}
CALLS |= {"dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object"}
CALLS |= {"dist.scatter_object_list", "dist.send_object_list", "dist.recv_object_list"}
CALLS |= {"builtins.eval", "builtins.exec", "importlib.import_module"}
#: Arguments that can enable unsafe behaviour.
ARGUMENTS = {"allow_pickle", "trust_remote_code", "weights_only", "shell"}

#: Uses by file, with the reason why untrusted input does not reach them.
ALLOWED = {
    ("proto/everlift/__init__.py", "importlib.import_module"): "a module of the file's own table",
    ("cluster/local/fork_server_process.py", "importlib.import_module"): (
        "a name that the parent process gives on its own pipe: one of the project's programs"
    ),
    ("worker/attention/flash_attention.py", "importlib.import_module"): "a name that stands there",
    ("worker/attention/flash_infer.py", "importlib.import_module"): "a name that stands there",
    ("router/chat/renderer.py", "jinja2.exceptions"): (
        "only what the sandbox of transformers raises, in a process without rights"
    ),
}


def found(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if is_unsafe(name.name))
            case ast.ImportFrom(module=str(module), names=names):
                yield from (module for _ in names[:1] if is_unsafe(module))
                yield from (
                    f"{module}.{name.name}" for name in names if f"{module}.{name.name}" in CALLS
                )
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield name
            case ast.Attribute() if (name := dotted(node)) in CALLS:
                yield name
            case ast.keyword(arg=str(name), value=value) if name in ARGUMENTS:
                if not (
                    isinstance(value, ast.Constant) and value.value is (name == "weights_only")
                ):
                    yield name


def modules_run(tree: ast.AST) -> Iterator[list[object]]:
    """Yield the words before ``-m`` in each command that runs a module."""
    for node in ast.walk(tree):
        match node:
            case ast.List(elts=words) | ast.Call(args=words):
                said = [word.value if isinstance(word, ast.Constant) else None for word in words]
                if "-m" in said:
                    yield said[: said.index("-m")]


def is_unsafe(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in MODULES for length in range(1, len(parts) + 1))


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case ast.Name(id=name):
            return name
    return ""


def in_files() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in found(ast.parse(path.read_text()))
    }


def test_unsafe_calls_are_listed_with_a_reason() -> None:
    assert len(FILES) > 300
    assert in_files() == ALLOWED.keys()
    assert all(len(reason) > 20 for reason in ALLOWED.values())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import multiprocessing.connection", "multiprocessing.connection"),
        ("from jinja2.sandbox import SandboxedEnvironment", "jinja2.sandbox"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("load = yaml.load", "yaml.load"),
        ("eval(text)", "eval"),
        ("np.fromfile(path, allow_pickle=True)", "allow_pickle"),
        ("read(path, trust_remote_code=config.trust)", "trust_remote_code"),
        ("read(path, weights_only=False)", "weights_only"),
        ("run(command, shell=True)", "shell"),
    ],
)
def test_unsafe_call_is_detected_in_every_spelling(text: str, name: str) -> None:
    assert name in set(found(ast.parse(text)))


def test_safe_calls_are_not_reported() -> None:
    closed = "yaml.safe_load(a)\nre.compile(b)\nload(c, trust_remote_code=False)\nmodel.eval()"
    assert list(found(ast.parse(closed))) == []


def test_module_runs_exclude_the_working_directory() -> None:
    runs = [run for path in FILES for run in modules_run(ast.parse(path.read_text()))]
    assert len(runs) >= 3
    assert all("-P" in run for run in runs)
