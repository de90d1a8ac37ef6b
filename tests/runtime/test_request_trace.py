"""A recorded request trace replays to the same schedule, and what differs is named."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from simulated_device import VOCAB_SIZE, request, simulated_engine

from castiron.perf.replay import replay
from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.messages import AddRequest
from castiron.runtime.request_trace import Arrived, Stepped, TraceWriter, read_trace


def make_engine(runs_ahead: bool = True) -> LLMEngine:
    """So few blocks that requests are preempted."""
    return simulated_engine(num_blocks=24, max_seqs=5, max_batched_tokens=16, runs_ahead=runs_ahead)


def record(path: Path, runs_ahead: bool = True) -> LLMEngine:
    """A busy hour: arrivals, priorities, aborts, preemptions, shared prefixes, drawn seeds."""
    engine = make_engine(runs_ahead)
    engine.start_recording(TraceWriter(path))
    rng = np.random.default_rng(4)
    shared = tuple(rng.integers(0, VOCAB_SIZE, 9).tolist())
    names: list[str] = []
    for turn in range(120):
        if turn < 60 and rng.random() < 0.5:
            names.append(f"r{turn}")
            own = tuple(rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 30))).tolist())
            random = {"temperature": 0.7} if rng.random() < 0.4 else {}
            prompt = shared + own if rng.random() < 0.5 else own
            engine.add_request(
                request(names[-1], prompt, int(rng.integers(1, 25)), int(rng.integers(0, 3)), **random)
            )
        if names and rng.random() < 0.1:
            engine.abort(str(rng.choice(names)))
        engine.step()
    while engine.has_unfinished():
        engine.step()
    return engine


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_replay_makes_the_same_steps(tmp_path: Path, runs_ahead: bool) -> None:
    first = record(tmp_path / "t.jsonl", runs_ahead)
    stats = first.stats()
    assert stats.num_preemptions > 0 and stats.num_aborted > 0 and stats.num_cache_hit_tokens > 0
    again = make_engine(runs_ahead)
    num_steps, difference = replay(again, tmp_path / "t.jsonl")
    assert difference == "" and num_steps >= 120
    assert msgspec.structs.replace(again.stats(), busy_s=0) == msgspec.structs.replace(stats, busy_s=0)
    _, events = read_trace(tmp_path / "t.jsonl")
    recorded = list(events)
    seeds = [event.request.sampling.seed for event in recorded if isinstance(event, Arrived)]
    assert None not in seeds and len(set(seeds)) == len(seeds) > 10
    assert sum(isinstance(event, Stepped) for event in recorded) == num_steps


def edit(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line], lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_text("".join(lines))


def test_the_first_step_that_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path)
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if i > 60 and '"scheduled":[["' in line)
    before = sum('"type":"stepped"' in line for line in lines[:place])
    name = msgspec.json.decode(lines[place])["scheduled"][0][0]
    edit(path, place, f'[["{name}"', '[["other"')
    num_steps, difference = replay(make_engine(), path)
    assert num_steps == before
    assert difference.startswith("scheduled[0] was ('other', ") and f"is ('{name}', " in difference


def test_a_changed_seed_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path)
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"temperature":0.7' in line)
    seed = msgspec.json.decode(lines[place])["request"]["sampling"]["seed"]
    edit(path, place, f'"seed":{seed}', f'"seed":{seed ^ 1}')
    assert replay(make_engine(), path)[1]


def test_another_engine_and_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path)
    with pytest.raises(InputError, match="other options: here is max_seqs 4 instead of 5"):
        replay(simulated_engine(num_blocks=24, max_seqs=4, max_batched_tokens=16), path)
    for text, message in (
        ("", "no trace of format 1"),
        ("{}\n", "line 1, is no event"),
        ("x", "no trace of format 1"),
    ):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(InputError, match=message):
            replay(make_engine(), tmp_path / "bad")
    with pytest.raises(InputError, match="can't read"):
        replay(make_engine(), tmp_path / "missing")


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path)
    whole = len(list(read_trace(path)[1]))
    path.write_bytes(path.read_bytes()[:-5])
    assert len(list(read_trace(path)[1])) == whole - 1
    assert replay(make_engine(), path)[1] == ""


def test_an_existing_file_stays_as_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for name in ("t.jsonl", "t.jsonl.1", "t.jsonl.2"):
        TraceWriter(path).close()
        assert (tmp_path / name).exists()
    with pytest.raises(WorkFailedError, match="can't write"):
        TraceWriter(tmp_path / "no" / "t.jsonl")


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    engine = make_engine()
    engine.add_request(AddRequest("a", (1, 2), request("a", (1,)).sampling))
    engine.step()
    assert not list(tmp_path.iterdir())
