"""The report as a browser's parser sees it: nothing hostile gets out of its place, and gaps in a run leave gaps."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from upswing.monitor.metrics import MetricsLog
from upswing.view.examples import write_examples
from upswing.view.report import write_report

from .sample import build_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"' onload='x' <|im_end|> & \u2028 ]]> <!--"


class Parsed(HTMLParser):
    """Tags, attributes and text; `scripts` holds what a browser would run."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.problems: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"stray </{tag}>")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data

    def having(self, **wanted: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.tags if all(a.get(k.rstrip("_")) == v for k, v in wanted.items())]


def report(run_dir: Path) -> Parsed:
    return Parsed(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Parsed:
    return report(build_run(tmp_path_factory.mktemp("runs") / "search"))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory) -> Parsed:
    return report(build_run(tmp_path_factory.mktemp("hostile") / "a<b>&c", HOSTILE))


def test_markup_is_balanced(page, hostile_page):
    for parsed in (page, hostile_page):
        assert parsed.problems == [] and parsed.open == []


def test_hostile_text_opens_no_element_and_no_handler(page, hostile_page):
    assert [tag for tag, _ in hostile_page.tags if tag in ("img", "iframe", "object", "link")] == []
    assert len(hostile_page.scripts) == 1
    assert hostile_page.scripts == page.scripts
    assert not [name for _, attributes in hostile_page.tags for name in attributes if name.startswith("on")]
    assert {tag for tag, _ in hostile_page.tags} == {tag for tag, _ in page.tags}


def test_hostile_text_is_still_readable_as_text(hostile_page):
    assert hostile_page.text.count("<script>alert(1)</script>") >= 6
    assert "<|im_end|>" in hostile_page.text


def test_nothing_is_loaded_and_only_the_own_script_may_run(page):
    for _, attributes in page.tags:
        assert not attributes.keys() & {"src", "srcset", "action"}
        assert (attributes.get("href") or "#").startswith("#")
    (policy,) = page.having(http_equiv="x") or [a for a in page.having() if "http-equiv" in a]
    assert policy["content"].startswith("default-src 'none'") and "sha256-" in policy["content"]
    raw = "".join(page.scripts)
    assert "http://" not in raw.replace("http://www.w3.org/2000/svg", "") and "fetch(" not in raw


def test_headline_shows_the_shares_intervals_and_the_test(page):
    for piece in (
        "base",
        "SFT",
        "SFT control",
        "RL",
        "strict match",
        "normalised match",
        "F1",
        "points vs SFT",
        "p < 0.001",
    ):
        assert piece in page.text, piece
    assert re.search(r"strict match, n = 20095 % interval \d+\.\d – \d+\.\d", page.text)
    assert "By kind" in page.text and "comparison" in page.text and "By hops" in page.text


def test_curves_have_axes_data_and_a_spoken_summary(page):
    charts = page.having(class_="chart")
    titles = [chart["aria-label"].split(":")[0] for chart in charts]
    for title in ("Reward", "Entropy", "Length", "Turns and tool calls", "Groups without a spread", "KL", "Loss"):
        assert title in titles, title
    assert "my_own_signal" in titles  # unknown metrics are shown too
    assert all(chart["tabindex"] == "0" and chart["role"] == "img" for chart in charts)
    reward = json.loads(charts[titles.index("Reward")]["data-chart"])
    assert [line["name"] for line in reward["series"]] == ["training", "evaluation, greedy"]
    assert len(reward["x"]) == 21  # steps 0 to 20
    assert reward["series"][0]["y"][0] is None and reward["series"][1]["y"][0] == 0.4


def test_a_null_is_a_gap_in_the_line(page):
    share = next(c for c in page.having(class_="chart") if c["aria-label"].startswith("Groups without"))
    data = json.loads(share["data-chart"])
    assert data["series"][0]["y"][data["x"].index(5.0)] is None
    assert "nan" not in share["data-chart"].lower()


def test_graduation_recovery_and_findings_are_in_words(page):
    assert "graduated: validation loss 0.3 fell by 0.8 %" in page.text
    assert "Recovery: the first search fails" in page.text
    assert page.having(class_="card example recovery")
    assert "reward and strict match part" in page.text and "Reward strictly." in page.text
    assert "groups were short" in page.text
    assert "torch" in page.text and "model: smollm2-135m" in page.text
    assert "1 file(s)" in page.text


def test_sampled_tokens_are_told_apart_and_carry_their_facts(page):
    runs = [a["class"] for _, a in page.tags if (a.get("class") or "").startswith("run ")]
    assert {"run sampled", "run given"} == set(runs)
    facts = [a["data-t"].split("|") for _, a in page.tags if a.get("data-t")]
    assert all(len(fact) == 4 for fact in facts)
    sampled = [fact for fact in facts if fact[3] == "3"]
    given = [fact for fact in facts if fact[3] == "-1"]
    assert sampled and given
    assert all(float(fact[1]) <= 0 for fact in sampled) and all(fact[1] == "" for fact in given)
    assert "Île-de-Bruxelles 🙂" in page.text.replace("·", "")


def test_keyboard_reaches_every_stream_chart_and_control(page):
    streams = page.having(class_="stream")
    assert streams and all(stream["tabindex"] == "0" and stream["aria-label"] for stream in streams)
    assert page.having(id="theme") and page.having(class_="skip", href="#main")
    targets = {a.get("id") for _, a in page.tags}
    assert {a["href"][1:] for _, a in page.tags if a.get("href")} <= targets


@pytest.mark.parametrize(
    "name",
    [
        "results.json",
        "metrics.jsonl",
        "examples.json",
        "findings.jsonl",
        "events.log",
        "environment.json",
        "recipe.yaml",
    ],
)
@pytest.mark.parametrize("broken", [None, '[{"label": "ba', "[1, null]"])
def test_missing_or_cut_files_leave_gaps_not_errors(tmp_path, full_run, name, broken):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for path in full_run.iterdir():
        if path.is_file():
            (run_dir / path.name).write_bytes(path.read_bytes())
    (run_dir / name).unlink()
    if broken is not None:
        (run_dir / name).write_text(broken)
    parsed = report(run_dir)
    assert parsed.problems == []
    assert ("By kind" in parsed.text) == (name != "results.json")
    assert ("Stage rl" in parsed.text) == (name != "metrics.jsonl")


@pytest.fixture(scope="module")
def full_run(tmp_path_factory) -> Path:
    return build_run(tmp_path_factory.mktemp("full"))


def test_an_empty_folder_still_gives_a_page(tmp_path):
    parsed = report(tmp_path)
    assert "No metrics yet" in parsed.text and parsed.problems == []


def test_a_result_without_scores_shows_dashes(tmp_path):
    entry = {"label": "broken", "stage": "eval", "split": "test", "mode": "greedy", "summary": {}, "paired": None}
    (tmp_path / "results.json").write_text(json.dumps([entry]))
    assert "broken" in report(tmp_path).text


def test_a_malformed_turn_is_no_call(tmp_path):
    records = [{"name": "", "ok": False, "result": "Invalid."}, {"name": "search", "ok": False}, {"name": "look"}]
    write_examples(tmp_path, [{"title": "x", "trajectories": [{"label": "RL", "tool_records": records}]}])
    shown = report(tmp_path).text
    assert "malformed turn" in shown and "search() failed" in shown and "look()" in shown
    assert shown.count("failed") == 1 and shown.count("()") == 2


def test_lone_surrogates_do_not_stop_the_report(tmp_path):
    (tmp_path / "environment.json").write_text('{"x": "\\ud800"}')
    assert "\\ud800" in report(tmp_path).text
    write_examples(tmp_path, [{"title": "\ud800"}])  # a model's JSON may hold one
    assert json.loads((tmp_path / "examples.json").read_text()) == [{"title": "\ud800"}]
    assert "\\ud800" in report(tmp_path).text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("results.json", '[{"label": "a", "summary": null}]', "a"),
        ("results.json", '[{"label": "a", "summary": {"components": [1]}}]', "can't be shown"),
        ("examples.json", '[{"trajectories": [1]}]', "can't be shown"),
        (
            "metrics.jsonl",
            '{"stage": "rl", "step": NaN, "reward": 1}\n{"stage": "rl", "step": 1, "reward": 1e999}',
            "rl",
        ),
        ("metrics.jsonl", '{"stage": "rl", "step": 1, "graduated": true, "words": null, "entropy": NaN}', "graduated"),
    ],
)
def test_files_of_another_shape_cost_their_section_only(tmp_path, name, content, said):
    (tmp_path / "recipe.yaml").write_text("name: kept")
    (tmp_path / name).write_text(content)
    parsed = report(tmp_path)
    assert said in parsed.text and "name: kept" in parsed.text and parsed.problems == []


def test_every_stage_has_its_curves_with_what_they_say(tmp_path):
    log = MetricsLog(tmp_path)
    of_stage = {
        "preference": ["validation_preference_accuracy", "validation_chosen_shift"],
        "reward_model": ["validation_accuracy"],
        "distill": ["kl", "ess_frac"],
        "rl": ["critic_explained_variance", "logprob_good", "reward"],
    }
    for stage, names in of_stage.items():
        for step in (1, 2):
            log.append(stage, step, dict.fromkeys(names, 0.1 * step))
    parsed = report(tmp_path)
    assert len(parsed.having(class_="chart")) == 8 and "More signals" not in parsed.text
    for words in ("good answers became less likely", "0.5 is a guess", "from the teacher", "1 is perfect"):
        assert words in parsed.text


def test_a_tag_with_a_value_a_question_has_no_table(tmp_path):
    score = {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 1}
    tags = {"id": {str(i): {"reward": score} for i in range(99)}, "kind": {"a": {"reward": score}}}
    entry = {"label": "x", "summary": {"by_tag": tags, "reward": {"mean": 12.5, "low": 11.0, "high": 14.0, "n": 9}}}
    (tmp_path / "results.json").write_text(json.dumps([entry]))
    text = report(tmp_path).text
    assert "By kind" in text and "By id" not in text
    assert "12.5" in text and "1250" not in text


def test_writing_again_replaces_the_report(tmp_path):
    build_run(tmp_path)
    first = write_report(tmp_path)
    size = first.stat().st_size
    assert write_report(tmp_path) == first == tmp_path / "report.html"
    assert abs(first.stat().st_size - size) < 100
    assert not list(tmp_path.glob("*.tmp"))
