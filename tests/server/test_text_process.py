"""run-engine --prompt with its tokenizer in a forked process: the same answers, no lost error, nothing left behind."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from castiron.server.text_process import can_fork

# run-engine with "change" carried out first; writes the child's process id to file descriptor 2 at the end
SCRIPT = """
import os, signal, sys
from castiron.server import cli, text_process
pids = []
fork = os.fork
def recorded():
    pid = fork()
    pids.append(pid)
    return pid
os.fork = recorded
{change}
code = cli.main(sys.argv[1:])
print("children:", *pids, file=sys.stderr)
sys.exit(code)
"""


def run_changed(change: str, *arguments: object) -> tuple[int, str, list[str], list[int]]:
    """Exit code, stdout, the lines of stderr and the children's process ids."""
    command = [sys.executable, "-c", SCRIPT.format(change=change), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *lines, last = done.stderr.splitlines()
    assert last.startswith("children:"), done.stderr
    return done.returncode, done.stdout, lines, [int(pid) for pid in last.split()[1:]]


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
@pytest.mark.parametrize("flags", [["--raw"], [], ["--logprobs", "2"]])
def test_a_forked_tokenizer_answers_as_one_in_this_process(tiny_chat_engine: Path, flags: list[str]) -> None:
    answers = []
    for change, num_children in (("", 1), ("text_process.can_fork = lambda: False", 0)):
        arguments = (tiny_chat_engine, "--prompt", "héllo<|end|>", "--max-tokens", 6, "--json", *flags)
        code, out, lines, children = run_changed(change, *arguments)
        assert code == 0 and lines == [] and len(children) == num_children
        answer = json.loads(out)
        assert answer.pop("peak_rss_bytes") > 10 << 20 and answer.pop("timings")
        answers.append(answer)
    assert answers[0] == answers[1] and answers[0]["text"] is not None


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ("text_process._run_child = lambda *_: os.kill(os.getpid(), signal.SIGKILL)", 1, "signal 9"),
        ("text_process._run_child = lambda *_: os._exit(7)", 1, "exit code 7"),
        (
            "import castiron.server.answer_text as text\n"
            "text.AnswerText.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
            1,
            "signal 9",
        ),
        (
            "import castiron.server.text_front as text\n"
            "class Panic(BaseException): pass\n"
            "Panic.__module__ = 'elsewhere'\n"
            "def load(path): raise Panic('the library panicked')\n"
            "text.TextFront.load = load",
            1,
            "the library panicked",
        ),
        ("import castiron.server.tokenizer as t\ndel t.FastTokenizer", 2, "tokenizer.json"),
        (
            "import castiron.server.text_front as text\n"
            "def load(path): raise MemoryError\n"
            "text.TextFront.load = load",
            1,
            "out of memory",
        ),
    ],
    ids=["killed", "ended", "killed-later", "panic", "engine-format", "memory"],
)
def test_what_ends_the_child_is_one_line_of_the_parent(
    tiny_chat_engine: Path, change: str, code: int, word: str
) -> None:
    ended, out, lines, children = run_changed(
        change, tiny_chat_engine, "--prompt", "x", "--max-tokens", 4, "--json"
    )
    assert (ended, out, len(lines), len(children)) == (code, "", 1, 1), lines
    assert lines[0].startswith("run-engine: ") and word in lines[0]


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_a_prompt_that_is_no_text_is_refused_before_a_child_is_made(tiny_chat_engine: Path) -> None:
    code, out, lines, children = run_changed(
        "", tiny_chat_engine, "--prompt", b"a\xff".decode(errors="surrogateescape")
    )
    assert (code, out, len(lines), len(children)) == (2, "", 1, 0), lines


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
@pytest.mark.parametrize("engine", ["missing", None])
def test_no_child_outlives_the_answer(tiny_chat_engine: Path, engine: str | None) -> None:
    code, _, _, children = run_changed("", engine or tiny_chat_engine, "--prompt", "x", "--max-tokens", 2)
    assert code == (2 if engine else 0) and len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()


def test_a_process_with_threads_is_not_forked() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not can_fork()
    end.set()
    thread.join()
