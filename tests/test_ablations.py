"""tests/ablations.py: the README's table follows from the stored results, verdicts follow their rule, cells resume."""
import json

import ablations
import demo
import deloop
import minigym
import pytest
from ablations import GROUPS, RESULTS, ROWS

CELL = {"subject": "s", "figures": dict.fromkeys(ablations.FIGURES, 0.0), "log_pi": None, "seconds": 1}


def store(folder, name, seed, loops, **more):
    """Write one result whose tasks have these numbers of loop steps."""
    rate = 100 * sum(map(bool, loops)) / len(loops)
    cell = {**CELL, "row": name, "seed": seed, "loops": loops, **more}
    (folder / f"{name}-{seed}.json").write_text(json.dumps({**cell, "figures": {**CELL["figures"], "loop_rate": rate}}))


def test_the_readme_holds_the_table_of_the_stored_results():
    """Property: what stands between the README's markers is, byte for byte, what --table writes there."""
    text = ablations.README.read_text(encoding="utf-8")
    shown = text.partition("<!-- ablations:begin -->\n")[2].partition("<!-- ablations:end -->")[0]
    assert shown == ablations.table(RESULTS)


def test_the_stored_results_are_those_of_the_shipped_policy():
    """Property: every stored result was made by the policy in tests/tiny and by the settings that stand in the code."""
    for file in RESULTS.glob("*.json"):
        name, _, seed = file.stem.rpartition("-")
        assert ablations.finished(RESULTS, ROWS[name], int(seed)), file


@pytest.mark.parametrize("low, high, expected, judged", [
    (0.1, 5, "higher", "agrees"), (-5, -0.1, "higher", "disagrees"), (-5, -0.1, "lower", "agrees"),
    (0.1, 5, "lower", "disagrees"), (-1, 1, "higher", "does not separate"), (0, 5, "higher", "does not separate"),
    (-5, 0, "lower", "does not separate"), (0.1, 5, "", "not stated")])
def test_verdict(low, high, expected, judged):
    """Property: the stated rule, on both sides of 0 and at 0."""
    assert ablations.verdict(low, high, expected) == judged


def test_the_table_pools_seeds_and_compares_the_same_tasks(tmp_path):
    """Property: on results made by hand, rates, differences and verdicts are those of the closed form."""
    looping, clean, half = [2] * 40, [0] * 40, [1, 0] * 20
    store(tmp_path, "base", 0, looping)
    store(tmp_path, "dpo", 0, clean, log_pi={"chosen": [-2.0, -1.0], "rejected": [-1.0, -3.0]})
    store(tmp_path, "dpo", 1, half, log_pi={"chosen": [-4.0, -1.0], "rejected": [-1.0, -5.0]})
    store(tmp_path, "sft", 0, clean)
    lines = {line.split(" | ")[0].strip("| "): line for line in ablations.table(tmp_path).splitlines()}
    assert "| 25.0 [" in lines["dpo"] and "; 0.0, 50.0 |" in lines["dpo"]
    assert "| -3.00 -> -1.00 | -1.00 -> -4.00 |" in lines["dpo"]
    assert "| base: -75.0 [" in lines["dpo"] and lines["dpo"].endswith("| agrees |")
    assert "| dpo: -25.0 [" in lines["sft"] and lines["sft"].endswith("| disagrees |")
    assert "| not run |" in lines["ipo"] and set(ROWS) <= set(lines)


def test_results_of_two_policies_are_refused(tmp_path):
    """Property: a table never mixes policies or tasks; the error says what to do."""
    store(tmp_path, "base", 0, [1, 0])
    store(tmp_path, "dpo", 0, [1, 0], subject="other")
    with pytest.raises(deloop.InputError, match="different policies or tasks; run tests/ablations.py again"):
        ablations.table(tmp_path)


def test_every_row_is_compared_with_a_row():
    """Property: names are files' names and unique; every row named by another exists; a side is stated only where the
    document has a figure or a sentence for it."""
    assert sum(len(rows) for _, rows in GROUPS.values()) == len(ROWS)
    for row in ROWS.values():
        assert {row.than, row.after, row.policy} <= {"", *ROWS} and row.expected in ("", "lower", "higher")
        assert not row.expected or row.than


@pytest.mark.slow
def test_a_cell_runs_resumes_and_is_done_once(tmp_path, monkeypatch):
    """Property: cells from rollouts to JSON by the real commands, SFT after DPO among them; a second call runs none."""
    monkeypatch.setattr(demo, "TASKS", {"train": 48, "heldout": 16})
    monkeypatch.setattr(demo, "DPO", [*demo.DPO, "--epochs", "1"])
    monkeypatch.setattr(ablations, "GROUPS", {"some": ("", [ROWS["base"], ROWS["pairs-1-4"], ROWS["sft-after-dpo"]])})
    ablations.subject.cache_clear()
    readme, results = tmp_path / "README.md", tmp_path / "results"
    readme.write_text("<!-- ablations:begin -->\n<!-- ablations:end -->\n")
    arguments = ["--only", "some", "--seeds", "1", "--out", str(tmp_path / "out"), "--results", str(results),
                 "--readme", str(readme)]

    def written():
        return {file.name: file.stat().st_mtime_ns for file in results.iterdir()}

    assert ablations.main(arguments) == 0
    files = written()
    assert sorted(files) == ["base-0.json", "pairs-1-4-0.json", "sft-after-dpo-0.json"]
    assert len(json.loads((results / "base-0.json").read_text())["loops"]) == 16
    assert ablations.main(arguments) == 0 and written() == files
    assert ablations.table(results) in readme.read_text()
    ablations.subject.cache_clear()


def test_the_task_files_are_those_of_the_command(tmp_path):
    """Property: tasks_text writes what `minigym.py tasks` writes, so the cells see the demonstration's tasks."""
    file = tmp_path / "tasks.jsonl"
    minigym.main(["tasks", "--split", "heldout", "--count", str(demo.TASKS["heldout"]), "--out", str(file)])
    assert file.read_text() == ablations.tasks_text("heldout")
