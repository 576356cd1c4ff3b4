"""A fault is one line: short, without a password, said once with the other lines it stands on, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.contract import UserError
from components.pipeline_checks import CHECKS
from flows.cli import COMMANDS, main
from flows.commands.terminal import Invocation
from flows.planning.step_signature import resolve
from flows.spec import diagnostics
from flows.spec.diagnostics import InputError, Problems, page_of_step, show, with_pages

ROOT = Path(__file__).resolve().parents[3]


def test_a_refused_address_is_shown_without_its_password() -> None:
    assert show("https://ann:s3cret@host/v1") == "'https://ann:***@host/v1'"


def test_every_page_that_an_error_may_name_exists() -> None:
    pages = {diagnostics.PAGE, diagnostics.PAGE_OF_PLACEMENT, Invocation.page, *(page for _, page in COMMANDS.values())}
    pages |= {*diagnostics.PAGE_OF_STEPS.values(), *diagnostics.PAGE_OF_CHECK.values()}
    assert [page for page in sorted(pages) if not (ROOT / "docs" / f"{page}.md").is_file()] == []
    assert {check.__name__ for check in CHECKS} == {*diagnostics.PAGE_OF_CHECK}
    for topic in diagnostics.PAGE_OF_STEPS:
        room, _, step = topic.partition(".")
        assert resolve(topic) if step else (ROOT / "components" / room / "steps.py").is_file()


def test_a_page_is_named_once_by_the_last_line_that_it_explains() -> None:
    problems = Problems("p.yaml")
    problems.add(3, "c", page=page_of_step("data.mix_prompts"))
    problems.add(1, "a")
    problems.add(2, "b")
    with pytest.raises(InputError) as raised:
        problems.stop()
    assert str(raised.value) == "p.yaml:1: a\np.yaml:2: b\np.yaml:3: c"
    told = with_pages(raised.value, "sql")
    assert told == "p.yaml:1: a\np.yaml:2: b (docs: first-pipeline)\np.yaml:3: c (docs: my-data)"
    assert with_pages(UserError("no such view"), "sql") == "no such view (docs: sql)"


@pytest.mark.parametrize(
    ("old", "new", "page"),
    [
        ("source: prompts.jsonl", "source: nosuch.jsonl", "my-data"),
        ("{model: my-model}", "{model: my-model, dtypes: x}", "my-model"),
        ('{method: "${matrix.method}"}', '{method: "${matrix.method}", stepz: 3}', "methods"),
        ("matrix: {method: [eagle3, mtp]}", "runs_on: {cluster: desk}", "scale"),
        ("uses: report.write_page", "uses: report.write_pages", "first-pipeline"),
    ],
)
def test_a_wrong_pipeline_names_the_page_of_what_is_wrong(
    old: str,
    new: str,
    page: str,
    tmp_path: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readme = (ROOT / "README.md").read_text()
    text = readme.split("```yaml\n")[1].split("```")[0]
    assert old in text
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "pipelines.yaml").write_text(text.replace(old, new))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "mine"]) == 2
    assert f"(docs: {page})" in capsys.readouterr().err
