"""Links, commands and examples of the project's Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Document, documents, fault, fault_of_example

PATHS = [pytest.param(ROOT / path, id=str(path)) for path in documents()]


def written(text: str) -> Document:
    """Return a document with this text in the root."""
    return Document(ROOT / "nowhere.md", text)


def missing_modules(folder: Path, text: str) -> list[str]:
    """Return the modules in the first columns of tables that do not exist."""
    columns = re.findall(r"^\| (`[^|]*)", text, re.MULTILINE)
    names = [name for column in columns for name in re.findall(r"`([\w/.]+\.py)`", column)]
    return [
        name
        for name in names
        if not (ROOT / name).exists() and not (folder / name).exists()
        if next(folder.rglob(name.rsplit("../", 1)[-1]), None) is None
    ]


def faults(document: Document) -> dict[str, str]:
    """Return the faults by command."""
    by_command = {" ".join(each.words): fault(each) for each in document.commands()}
    return {words: what for words, what in by_command.items() if what}


@pytest.mark.parametrize("path", PATHS)
def test_documents_have_no_dead_link(path: Path) -> None:
    assert not list(Document.read(path).dead_links())


@pytest.mark.parametrize("path", PATHS)
def test_document_tables_name_existing_modules(path: Path) -> None:
    assert missing_modules(path.parent, path.read_text()) == []


def test_documents_have_at_most_32000_words() -> None:
    apart = {Path("CHANGELOG.md"), Path("benchmarks/RESULTS.md")}
    texts = {path: (ROOT / path).read_text() for path in {*documents()} - apart}
    assert sum(len(text.split()) for text in texts.values()) <= 32_000
    assert len(texts[Path("README.md")].split()) <= 1_200
    for path, text in texts.items():
        # The table of metrics repeats the catalogue.
        written = re.sub(r"^\| `everlift_.*$", "", text, flags=re.MULTILINE)
        assert len(written.split()) <= 1_500, path


def test_missing_modules_reports_an_absent_file() -> None:
    text = "| `gone.py`, `conftest.py` | what |"
    assert missing_modules(ROOT / "tests", text) == ["gone.py"]


@pytest.mark.parametrize("path", PATHS)
def test_document_commands_are_valid(path: Path) -> None:
    assert not faults(Document.read(path))


@pytest.mark.parametrize("path", PATHS)
def test_document_yaml_examples_are_valid(path: Path) -> None:
    assert not [what for each in Document.read(path).examples() if (what := fault_of_example(each))]


def test_documents_include_the_readme_and_the_guides() -> None:
    names = {str(path) for path in documents()}
    assert {"README.md", "SECURITY.md", "deploy/RUNBOOK.md", "deploy/guides/tuning.md"} <= names
    assert sum(len(list(Document.read(ROOT / name).commands())) for name in names) > 200


@pytest.mark.parametrize(
    "link",
    [
        "tests/README.md",
        "./tests/",
        "tests/README.md#fuzzing",
        "#a-heading--of-two-max_num_seqs",
        "#twice-1",
        "https://example.com/#anything",
    ],
)
def test_dead_links_accepts_a_valid_link(link: str) -> None:
    text = f"# A heading, & of two: `max_num_seqs`\n\n## Twice\n\n## Twice\n\n[x]({link})"
    assert list(written(text).links()) == [link]
    assert not list(written(text).dead_links())


@pytest.mark.parametrize(
    "text",
    [
        "[x](tests/GONE.md)",
        "![x](pictures/gone.png)",
        "| a |\n|---|\n| [x](gone.md) |",
        "[x][y]\n\n[y]: gone.md",
        "[x](#no-such-heading)",
        "[x](tests/README.md#no-such-heading)",
        "[x](Makefile#test)",
        "[x](../outside.md)",
        "[x](https:no-host)",
    ],
)
def test_dead_links_reports_a_broken_link(text: str) -> None:
    assert len(list(written(text).dead_links())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "```sh\neverlift up --no-ray --workers 2   # not --modle\n```",
        "    everlift generate Once --address HEAD:50051 > out",
        "    export EVERLIFT_API_KEY=$(everlift key create --tenant acme)",
        "    ray exec cluster.yaml 'everlift tenant set acme --weight 3'",
        "    kubectl exec $pod -- everlift key list --set router.access=ledger",
        "    EVERLIFT_WORKER__MAX_NUM_SEQS=64 everlift up",
        "    SOAK_MINUTES=3 make soak",
        "    everlift bench serve --rate 5 \\\n        --duration 10",
        "```console\n$ make help\nmake prints this: everlift is no command here\n```",
        "`everlift up --config`, `everlift chaos`, `make bench-*`",
    ],
)
def test_command_check_accepts_a_valid_command(text: str) -> None:
    assert list(written(text).commands())
    assert not faults(written(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    everlift upp", "no command upp"),
        ("    everlift chaos drown any-worker", "no command drown"),
        ("    everlift chaos", "chaos needs a command"),
        ("    everlift up --modle x", "--modle"),
        ("    everlift up --workers", "requires an argument"),
        ("    everlift up --workers two", "--workers"),
        ("    everlift generate", "Missing argument"),
        ("    everlift status now", "unexpected extra argument"),
        ("    everlift up --set router.prot=0", "port"),
        ("    everlift up --set worker.max_num_seqs=0", "max_num_seqs"),
        ("    EVERLIFT_WORKER__MAX_NUM_SEQ=64 everlift up", "MAX_NUM_SEQS"),
        ("    kubectl exec $pod -- everlift keys", "no command keys"),
        ("    ray exec cluster.yaml 'everlift keys'", "no command keys"),
        ("    echo x | make tests", "make knows no tests"),
        ("```console\n$ everlift upp\n```", "no command upp"),
        ("`everlift up --modle`", "up has no --modle"),
        ("`make tests`", "make knows no tests"),
    ],
)
def test_command_check_reports_an_invalid_command(text: str, expected: str) -> None:
    [what] = faults(written(text)).values()
    assert expected in what


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("router: {port: 0}\nworker: {max_num_seqs: 8}", ""),
        ("workers: {min: 1, max: 8}\nconfig:\n  worker: {max_num_seqs: 8}", ""),
        ("router: {prot: 0}", "port"),
        ("worker: {max_num_seqs: 0}", "max_num_seqs"),
        ("workers: {mim: 1}", "mim"),
        ("workers: {min: 1}\nconfig:\n  worker: {max_num_sqes: 8}", "max_num_sqes"),
    ],
)
def test_yaml_example_check_reports_its_fault(example: str, expected: str) -> None:
    [block] = written(f"```yaml\n{example}\n```").examples()
    what = fault_of_example(block)
    assert expected in what and bool(expected) == bool(what)
