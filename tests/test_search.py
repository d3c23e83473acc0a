"""tests/search.py: the README's table follows from the stored results, step sizes and clear differences from rules."""
import json

import demo
import pytest
import search


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results; store(name, split, loops, solved) writes one."""
    monkeypatch.setattr(search, "RESULTS", tmp_path)

    def store(name, split, loops, solved):
        (tmp_path / f"{name}.json").write_text(json.dumps({"pairs": 9, split: {"loops": loops, "solved": solved}}))
    return store


def test_the_readme_holds_the_table_of_the_stored_results():
    """Property: what stands between the README's markers is, byte for byte, what --table writes there."""
    text = demo.README.read_text(encoding="utf-8")
    assert text.partition("<!-- search:begin -->\n")[2].partition("<!-- search:end -->")[0] == search.table()


@pytest.mark.parametrize("looping, solved, best", [
    ((4, 2, 6, 3), (9, 9, 9, 9), 1),        # fewest loops
    ((4, 2, 0, 1), (9, 9, 8, 7), 1),        # but not where success fell by more than 5 points
    ((4, 4, 4, 4), (9, 10, 9, 9), 1),       # a tie: higher success
    ((4, 2, 6, 3), (0, 0, 1, 8), 1)])       # none is allowed: fewest loops
def test_the_best_step_size(results, looping, solved, best):
    """Worked examples of the rule, 10 tasks, a base that solves 9."""
    results("boxes", "screen", [1] * 10, [1] * 9 + [0])
    for rate, loops, good in zip(search.RATES, looping, solved):
        name = search.Cell("boxes", 1.0, "dpo", rate).name
        results(name, "screen", [2] * loops + [0] * (10 - loops), [1] * good + [0] * (10 - good))
    assert search.best("boxes", 1.0, "dpo") == search.RATES[best]


def test_a_clear_difference_is_large_and_beyond_its_interval():
    """Worked examples: figures over seeds are means over tasks; equal runs part in nothing, opposite ones in all."""
    good = {"final": {"loops": [0] * 40, "solved": [1] * 40}}
    bad = {"final": {"loops": [2] * 20 + [0] * 20, "solved": [0] * 20 + [1] * 20}}
    samples = search.evaluation.resample(40, 200, 0)
    mixed = search.figures([good, bad], "final")
    assert [mixed[name][0] for name in search.CLEAR] == [25, 0.5, 75]
    assert search.parted([good], [good], samples) == (
        "+0.0 [+0.0, +0.0] / +0.00 [+0.00, +0.00] / +0.0 [+0.0, +0.0] | no")
    told, clear = search.parted([good], [bad], samples).split(" | ")
    assert told.startswith("+50.0 [+") and "/ +1.00 [+" in told and "/ -50.0 [-" in told
    assert clear == "loop rate, loop steps, success"
    assert search.parted([good, bad], [bad, bad], samples).endswith(" | no"), "one seed of each is the same"


def test_no_task_is_screened_and_final():
    """Property: the screening tasks, the final ones and the training ones are disjoint; order's final ones are the
    demonstration's."""
    for gym in search.GYMS.values():
        sets = [{row["ability"] for row in gym.tasks(split)} for split in ("train", "screen", "final")]
        assert list(map(len, sets)) == [gym.train, search.SCREEN, search.FINAL] and len(set.union(*sets)) == sum(
            map(len, sets))
    assert search.GYMS["order"].tasks("final") == search.minigym.make_tasks("heldout", demo.TASKS["heldout"], 0)
