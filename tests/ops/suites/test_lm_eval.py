"""Any task of the harness on a tiny checkpoint: task files of a user's own, every score with its error, items, and what is refused, and how."""

import json
from types import SimpleNamespace

import pytest

from assay.ops.measure import measure
from assay.ops.suites import subject as opening
from assay.ops.suites.lm_eval import items_of, load, rows, settle
from assay.ops.suites.subject import Subject
from assay.schemas.protocols import LmEval

CHOICE = """
task: colours
custom_dataset: !function data.colours
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: gold
doc_to_choice: options
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 3}
"""
WORDS = """
task: words
custom_dataset: !function data.colours
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: "\\n", max_gen_toks: 3}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: first, filter: [{function: take_first}]}
metadata: {version: 1}
"""
ROLLING = """
task: rolled
custom_dataset: !function data.colours
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
metadata: {version: 1}
"""
UNSAFE = CHOICE.replace("colours\ncustom", "dangerous\nunsafe_code: true\ncustom")
ON_THE_HUB = """
task: far
dataset_path: nobody/nothing_of_this_name
test_split: test
doc_to_text: x
doc_to_target: x
"""
GROUP = "group: both\ntask: [colours, words]\naggregate_metric_list: [{metric: acc, filter_list: none}]\nmetadata: {version: 1}\n"
DATA = """
def colours(**_):
    from datasets import Dataset
    return {"test": Dataset.from_list([{"question": f"colour {n}:", "options": ["red", "green"], "gold": n % 2} for n in range(7)])}
"""


@pytest.fixture(scope="module")
def base(make_llama, save_checkpoint_dir, tmp_path_factory):
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()
    return save_checkpoint_dir(make_llama(vocab=101, layers=2), tmp_path_factory.mktemp("lm_eval") / "base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("own")
    (where / "tasks").mkdir()
    files = {"colours": CHOICE, "words": WORDS, "rolled": ROLLING, "dangerous": UNSAFE, "far": ON_THE_HUB, "both": GROUP}
    for name, text in files.items():
        (where / "tasks" / f"{name}.yaml").write_text(text)
    (where / "tasks" / "data.py").write_text(DATA)
    return where


@pytest.fixture(scope="module", autouse=True)
def only_ours(folder):
    """Without the thousands of task files of the harness, which take seconds to list."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    lm_eval.tasks.TaskManager = lambda include_path: manager(include_path=include_path, include_defaults=False)  # type: ignore[misc,assignment]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ASSAY_RUN_TASK_FILES", "1")
        yield
    lm_eval.tasks.TaskManager = manager  # type: ignore[misc]


def run(folder, base, *tasks, **more):
    protocol = LmEval(tasks=tasks, include="tasks", **more)
    result = measure(protocol, Subject(base, None, None, base), reference=None, experiment_dir=folder)
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


def test_every_score_is_a_fact_with_its_error_and_every_sample_an_item(folder, base):
    result = run(folder, base, "colours", "words", "rolled", questions=5)
    found = {row["slice"]: row for row in result.metrics}
    assert set(found) == {"colours/acc", "words/exact_match/first", "rolled/word_perplexity", "rolled/bits_per_byte"}
    assert all(row["metric"] == "harness_score" and row["slice_kind"] == "task_metric" and row["n"] == 5 for row in result.metrics)
    mine = [item["value"] for item in result.items if item["metric"] == "acc/colours"]
    assert found["colours/acc"]["value"] == sum(mine) / 5 and [
        item["item"] for item in result.items if item["metric"] == "acc/colours"
    ] == [*range(5)]
    share = sum(mine) / 5
    assert found["colours/acc"]["standard_error"] == pytest.approx((share * (1 - share) / 4) ** 0.5)
    assert found["rolled/bits_per_byte"]["value"] > 0 and found["rolled/bits_per_byte"]["standard_error"] is None
    assert result.notes["versions"]["colours"] == 3 and result.notes["cut"] >= 0


def test_scores_are_those_of_the_harness_with_its_own_model(folder, base):
    from lm_eval.models.huggingface import HFLM

    from assay.ops.suites.tasks import evaluate

    protocol = LmEval(tasks=("colours", "rolled", "words"), include="tasks")
    theirs = evaluate(HFLM(pretrained=str(base), dtype="float32", device="cpu", batch_size=4), load(protocol, folder), chat=False)  # type: ignore[arg-type]
    found = {row["slice"]: row["value"] for row in run(folder, base, *protocol.tasks).metrics}
    for name, key in (
        ("colours", "acc,none"),
        ("rolled", "word_perplexity,none"),
        ("rolled", "bits_per_byte,none"),
        ("words", "exact_match,first"),
    ):
        slice_ = f"{name}/{key}".replace(",", "/").removesuffix("/none")
        assert found[slice_] == pytest.approx(theirs["results"][name][key], rel=1e-4)


def test_a_group_has_its_own_score_beside_its_tasks(folder, base):
    found = {row["slice"]: row for row in run(folder, base, "both").metrics}
    assert found["both/acc"]["value"] == found["colours/acc"]["value"] and found["both/acc"]["n"] == 7
    assert "words/exact_match/first" in found


def test_shots_and_seed_are_the_protocol_s_and_a_lone_stop_becomes_a_list(folder):
    protocol = LmEval(tasks=("colours", "words"), include="tasks", shots=2, seed=5)
    tasks = load(protocol, folder)["tasks"]
    assert tasks["colours"].get_config("num_fewshot") == 2 and tasks["words"].get_config("generation_kwargs")["until"] == ["\n"]
    document = tasks["colours"].eval_docs[0]
    first, again, other = (
        load(LmEval(tasks=("colours",), include="tasks", shots=2, seed=seed), folder)["tasks"]["colours"] for seed in (5, 5, 6)
    )
    assert first.fewshot_context(document, 2) == again.fewshot_context(document, 2) != other.fewshot_context(document, 2)
    fixed = SimpleNamespace(config={"num_fewshot": 0}, set_fewshot_seed=lambda seed: None)
    fixed.get_config, fixed.set_config = fixed.config.get, lambda key, value: fixed.config.update({key: value})
    settle(fixed, 3, 0)
    assert fixed.config["num_fewshot"] == 0  # a task that says so has no shots


def test_code_that_a_model_writes_is_run_only_where_that_is_allowed(folder, base, monkeypatch):
    monkeypatch.delenv("ASSAY_RUN_GENERATED_CODE", raising=False)
    with pytest.raises(ValueError, match="the task dangerous runs code that the model writes; set ASSAY_RUN_GENERATED_CODE=1"):
        run(folder, base, "dangerous")
    monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", "1")
    assert run(folder, base, "dangerous").metrics[0]["slice"] == "dangerous/acc"


def test_task_files_of_one_s_own_are_read_only_where_that_is_allowed(folder, monkeypatch):
    monkeypatch.delenv("ASSAY_RUN_TASK_FILES")
    with pytest.raises(PermissionError, match=r"task files can run code .* set ASSAY_RUN_TASK_FILES=1"):
        load(LmEval(tasks=("colours",), include="tasks"), folder)


def test_a_task_whose_data_are_out_of_reach_is_named_with_its_data_set(folder):
    with pytest.raises(ConnectionError, match=r"the task far \(nobody/nothing_of_this_name\) is not in the local cache"):
        load(LmEval(tasks=("far",), include="tasks"), folder)


def test_unknown_tasks_and_folders_are_told(folder):
    with pytest.raises(ValueError, match="no task 'colors_of', and include=tasks neither"):
        load(LmEval(tasks=("colors_of",), include="tasks"), folder)
    with pytest.raises(ValueError, match=r"include=nowhere is no directory; looked at .*nowhere"):
        load(LmEval(tasks=("colours",), include="nowhere"), folder)


def test_a_score_that_is_no_number_or_not_finite_is_no_fact_as_a_number():
    scores = {
        "alias": "x",
        "name": "x",
        "sample_len": 4,
        "acc,none": float("nan"),
        "acc_stderr,none": "N/A",
        "f1,none": 0.5,
        "f1_stderr,none": 0.1,
    }
    first, second = rows("x", scores, {"x": 4}, "p")
    assert (first["slice"], first["value"], first["status"], first["standard_error"]) == ("x/acc", None, "not_finite", None)
    assert (second["slice"], second["value"], second["standard_error"], second["n"]) == ("x/f1", 0.5, 0.1, 4)
    sample = {"doc_id": 3, "filter": "none", "metrics": ["acc", "pair", "bad"], "acc": True, "pair": (1, 2), "bad": float("inf")}
    assert items_of("x", sample) == [{"item": 3, "metric": "acc/x", "value": 1.0}]


def test_a_data_set_s_own_code_is_never_run(folder, tmp_path):
    """Whatever a task file says of trust: the script would leave a file behind."""
    script = tmp_path / "scripted"
    script.mkdir()
    (script / "scripted.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nimport datasets\nclass Scripted(datasets.GeneratorBasedBuilder): ...\n"
    )
    more = f"dataset_path: {script}\ndataset_kwargs: {{trust_remote_code: true}}\n"
    (folder / "tasks" / "scripted.yaml").write_text(f"task: scripted\n{more}test_split: test\ndoc_to_text: x\ndoc_to_target: x\n")
    with pytest.raises(Exception, match="script"):
        load(LmEval(tasks=("scripted",), include="tasks"), folder)
    assert not (tmp_path / "ran").exists()
