"""run-engine answering in this process: --prompt, --prompt-ids, --chat, and every wrong way to call it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castiron.server.cli import main

TIMINGS = {
    "import_s",
    "load_plan_s",
    "device_init_s",
    "load_weights_s",
    "build_graphs_s",
    "start_to_first_token_s",
    "ttft_ms",
    "tpot_ms",
}
FIELDS = {
    "text",
    "token_ids",
    "prompt_token_ids",
    "finish_reason",
    "logprobs",
    "timings",
    "peak_rss_bytes",
}
COMMAND = [sys.executable, "-m", "castiron.server.cli"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """The object that --json prints; nothing else may be on stdout or stderr."""
    assert main([str(argument) for argument in (*arguments, "--json")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_json_has_all_fields_and_timings(tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, tiny_chat_engine, "--prompt-ids", "5,6,7", "--max-tokens", 5)
    assert set(result) == FIELDS
    assert result["prompt_token_ids"] == [5, 6, 7]
    assert len(result["token_ids"]) == 5 and result["finish_reason"] == "length"
    assert isinstance(result["text"], str) and result["logprobs"] is None
    assert 10 << 20 < result["peak_rss_bytes"] < 1 << 40
    timings = result["timings"]
    assert set(timings) == TIMINGS and all(value >= 0 for value in timings.values())
    loading_s = sum(
        timings[name] for name in ("load_plan_s", "device_init_s", "load_weights_s", "build_graphs_s")
    )
    assert timings["start_to_first_token_s"] >= timings["import_s"] + loading_s


def test_one_token_has_no_time_per_later_token(
    tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = answer(capsys, tiny_chat_engine, "--prompt-ids", "5", "--max-tokens", 1)
    assert len(result["token_ids"]) == 1 and result["timings"]["tpot_ms"] is None


def test_the_chat_template_is_applied_unless_raw(
    tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, end = 257, 256
    chat = answer(capsys, tiny_chat_engine, "--prompt", "hi<|end|>", "--max-tokens", 2)["prompt_token_ids"]
    assert chat.count(start) == 2 and chat.count(end) == 1
    raw = answer(capsys, tiny_chat_engine, "--prompt", "hi<|end|>", "--raw", "--max-tokens", 2)[
        "prompt_token_ids"
    ]
    assert len(raw) == 3 and raw[-1] == end


def test_text_and_ids_give_the_same_answer(
    tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_text = answer(capsys, tiny_chat_engine, "--prompt", "hello", "--raw", "--max-tokens", 8)
    ids = ",".join(map(str, by_text["prompt_token_ids"]))
    by_ids = answer(capsys, tiny_chat_engine, "--prompt-ids", ids, "--max-tokens", 8)
    assert by_ids["token_ids"] == by_text["token_ids"] and by_ids["text"] == by_text["text"]
    assert main([str(tiny_chat_engine), "--prompt", "hello", "--raw", "--max-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out == by_text["text"] + "\n"
    assert "tokens/s" in captured.err and "first token" in captured.err and captured.err.count("\n") == 1


def test_a_seed_fixes_a_sampled_answer(tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(seed: int, *more: object) -> Any:
        flags = ("--prompt-ids", "5,6", "--temperature", 1.5, "--max-tokens", 12, "--seed", seed, *more)
        return answer(capsys, tiny_chat_engine, *flags)["token_ids"]

    assert sampled(1) == sampled(1) != sampled(2)
    greedy = answer(capsys, tiny_chat_engine, "--prompt-ids", "5,6", "--max-tokens", 12)["token_ids"]
    assert sampled(1, "--top-k", 1) == sampled(2, "--top-p", 1e-6) == greedy


def test_logprobs_are_printed_for_every_token(
    tiny_chat_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = answer(capsys, tiny_chat_engine, "--prompt", "a", "--max-tokens", 3, "--logprobs", 2)
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]  # greedy
        assert (
            entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-5)
            and entry["logprob"] < 0
        )


def test_a_negative_seed_and_a_top_k_of_minus_1_are_taken(
    tiny_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompt-ids", "1", "--max-tokens", "8", "--temperature", "2", "--json"]
    answers = []
    for seed, top_k in ((-1, -1), (2**64 - 1, 0)):
        assert main([str(tiny_engine), *flags, "--seed", str(seed), "--top-k", str(top_k)]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1]


WRONG: list[tuple[list[str], str]] = [
    (["--nonsense"], "--nonsense"),
    (["--prom", "x"], "--prom"),
    (["--prompt", "x", "--chat"], "--chat"),
    (["--prompt"], "--prompt"),
    (["--prompt", ""], "empty"),
    (["--prompt-ids", ""], "list of token ids"),
    (["--prompt-ids", "1,,2"], "list of token ids"),
    (["--prompt-ids", "a"], "list of token ids"),
    (["--prompt-ids", "-1"], "token id -1"),
    (["--prompt-ids=-1"], "0 to"),
    (["--prompt-ids", "1,99999"], "99999"),
    (
        ["--prompt-ids", "1,2,3,4", "--max-seq-len", "4"],
        "4 tokens, a sequence may have 4 with at least 1 new",
    ),
    (
        ["--prompt-ids", "1,2,3,4", "--max-seq-len", "4"],
        "tokens or load the engine with a higher --max-seq-len\n",
    ),
    (["--prompt-ids", "1," * 1100 + "1"], "1101"),
    (["--prompt-ids", "1", "--max-tokens", "5000"], "--max-tokens is 5000"),
    (["--prompt-ids", "1", "--max-tokens", "0"], "positive"),
    (["--prompt-ids", "1", "--max-tokens", "x"], "positive"),
    (["--prompt-ids", "1", "--temperature", "-1"], "--temperature is -1"),
    (["--prompt-ids", "1", "--temperature", "nan"], "--temperature is nan"),
    (["--prompt-ids", "1", "--top-p", "0"], "--top-p is 0"),
    (["--prompt-ids", "1", "--top-k", "-5"], "--top-k is -5"),
    (["--prompt-ids", "1", "--seed", str(2**64)], "--seed is"),
    (["--prompt-ids", "1", "--seed", str(-(2**63) - 1)], "--seed is"),
    (["--prompt-ids", "1", "--logprobs", "3"], "--json"),
    (["--prompt-ids", "1", "--json", "--logprobs", "21"], "--logprobs is 21"),
    (["--prompt-ids", "1", "--raw"], "--raw"),
    (["--prompt-ids", "1", "--port", "80"], "--port"),
    (["--chat", "--json"], "--json"),
    (["--chat", "--raw"], "--raw"),
    (["--json"], "--json"),
    (["--temperature", "1"], "--temperature"),
    (["--port", "99999"], "99999"),
    (["--prompt-ids", "1", "--kv-memory", "lots"], "lots"),
    (["--prompt-ids", "1", "--kv-memory", "0"], "0"),
    (["--prompt-ids", "1", "--kv-memory", "5"], "one block needs"),
    (["--prompt-ids", "1", "--kv-memory", "5"], "raise --kv-memory"),
    (["--prompt-ids", "1", "--threads", "100000"], "--threads is 100000, expected 1 to"),
    (["--prompt-ids", "1", "--threads", "0"], "positive"),
    (["--prompt-ids", "1", "--max-seqs", "100000"], "--max-seqs is 100000"),
    (["--max-seqs", "100000"], "--max-seqs is 100000"),
    (["--prompt-ids", "1", "--max-seq-len", "100000"], "--max-seq-len is 100000"),
    (["--prompt", "a\udcff"], "Unicode"),
    (["--prompt-ids", "1", "--max-tokens", "9" * 20], "at most 18 digits"),
    (["--prompt-ids", "1," + "9" * 20], "out of range"),
    (["--port", "x"], "not a whole number"),
    (["--prompt-ids", "1", "--seed", "x"], "not a whole number"),
    (["--prompt-ids", "1", "--top-p", "x"], "not a number"),
    (["--host", ""], "empty"),
    (["--served-model-name", ""], "empty"),
]


@pytest.mark.parametrize(("flags", "word"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_call_is_one_line_and_exit_code_2(
    tiny_chat_engine: Path, flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny_chat_engine), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("run-engine: ")
    assert word in captured.err and len(captured.err) < 400


@pytest.mark.parametrize("mode", [["--prompt", "x"], ["--prompt-ids", "1"], ["--chat"], []])
def test_an_engine_that_is_no_engine_is_one_line(
    tmp_path: Path, tiny_chat_engine: Path, mode: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tiny_chat_engine.read_bytes()
    (tmp_path / "truncated").write_bytes(data[:-1000])
    (tmp_path / "text").write_bytes(b"not an engine")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("missing", "truncated", "text", "empty", "."):
        assert main([str(tmp_path / name), *mode]) in (2, 3)
        captured = capsys.readouterr()
        assert (
            captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("run-engine: ")
        )


def test_no_arguments_and_help_behave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--help"]) == 0
    assert "--prompt-ids" in capsys.readouterr().out


RECORD_IMPORTS = """
import sys
from castiron.server import one_answer
ages = []
real = one_answer.process_age_s
def recording():
    ages.append({name for name in ("numpy", "tokenizers", "jinja2", "aiohttp", "asyncio") if name in sys.modules})
    return real()
one_answer.process_age_s = recording
from castiron.server.cli import main
code = main(sys.argv[1:])
print(*sorted(ages[-1]), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the tokenizer has a process of its own on Linux only")
@pytest.mark.parametrize("flags", [["--prompt-ids", "1"], ["--prompt", "x", "--raw"], ["--prompt", "x"]])
def test_until_the_first_token_only_what_is_needed_is_imported(
    tiny_chat_engine: Path, flags: list[str]
) -> None:
    command = [
        sys.executable,
        "-c",
        RECORD_IMPORTS,
        str(tiny_chat_engine),
        *flags,
        "--max-tokens",
        "2",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "numpy"  # jinja2 and tokenizers are the other process's
    imports = (
        "import castiron.server.answer_text, castiron.server.chat_prompt, sys; print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", "which in turn doesn't need NumPy"


def test_a_prompt_is_read_as_utf8_whatever_the_locale(tiny_chat_engine: Path) -> None:
    command = [*COMMAND, str(tiny_chat_engine), "--prompt", "é", "--raw", "--max-tokens", "20"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_ctrl_c_ends_with_130_and_no_traceback(tiny_chat_engine: Path) -> None:
    # sampled, so that the answer goes on until something visible was written
    flags = ["--prompt", "abc", "--raw", "--max-tokens", "1000", "--temperature", "3", "--seed", "1"]
    process = subprocess.Popen([*COMMAND, str(tiny_chat_engine), *flags], stderr=subprocess.PIPE, stdout=-1)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"run-engine: interrupted\n"


def test_a_reader_that_goes_away_is_no_error_message(tiny_chat_engine: Path) -> None:
    flags = ["--prompt", "abc", "--raw", "--max-tokens", "200", "--temperature", "2", "--seed", "1"]
    process = subprocess.Popen(
        [*COMMAND, str(tiny_chat_engine), *flags], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(60) == 141
    assert "Traceback" not in err and "Broken" not in err


def chat(engine: Path, text: str, *flags: str) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr of a chat with these lines as input."""
    command = [*COMMAND, str(engine), "--chat", "--max-tokens", "6", *flags]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.split("\n"), done.stderr


def test_a_chat_remembers_until_it_is_reset(tiny_chat_engine: Path) -> None:
    code, lines, notes = chat(
        tiny_chat_engine, "hello\nhello\n/reset\nhello\n/help\n/what\n\n/exit\nnot read\n"
    )
    assert code == 0
    assert "forgotten" in notes and "/what" in notes and "Ctrl-D" in notes
    once = chat(tiny_chat_engine, "hello\n")
    assert once[0] == 0
    text, after_one = "\n".join(lines), "\n".join(once[1])
    assert text.startswith(after_one.rstrip("\n")) and text.rstrip("\n").endswith(after_one.rstrip("\n"))


def test_a_chat_that_grows_too_long_says_so_and_goes_on(tiny_chat_engine: Path) -> None:
    code, _, notes = chat(tiny_chat_engine, "x" * 2000 + "\nhi\n", "--max-seq-len", "128")
    assert code == 0
    assert "128" in notes and "/reset" in notes and "tokens/s" in notes


def test_a_chat_whose_input_is_not_utf8_ends_with_one_line_and_exit_code_2(tiny_chat_engine: Path) -> None:
    command = [*COMMAND, str(tiny_chat_engine), "--chat", "--max-tokens", "6"]
    done = subprocess.run(command, input=b"hello\ncaf\xe9\nhello\n", capture_output=True, timeout=120)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert (
        lines[-1].startswith("run-engine: a line of the input is not UTF-8 text") and "Traceback" not in lines
    )
    assert sum("tokens/s" in line for line in lines) == 1  # the first line was answered


def test_a_chat_on_a_terminal_that_can_not_show_the_answer_goes_on(tiny_chat_engine: Path) -> None:
    flags = ["--chat", "--max-tokens", "40", "--temperature", "3", "--seed", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*COMMAND, str(tiny_chat_engine), *flags],
        input=b"hi\n",
        capture_output=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_chat_needs_a_template(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_engine), "--chat"]) == 2
    assert "chat template" in capsys.readouterr().err
    assert main([str(tiny_engine), "--prompt", "x", "--max-tokens", "2"]) == 0
