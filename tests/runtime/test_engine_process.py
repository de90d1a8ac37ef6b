"""The engine process and its client: streams, aborts, load errors, crashes, restarts, ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

import pytest
from simulated_device import VOCAB_SIZE, expected_tokens, request

from castiron.runtime.engine_client import EngineClient
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.errors import EngineTargetError, InputError, RequestError, WorkFailedError
from castiron.runtime.messages import AddRequest, RequestOutput
from castiron.runtime.restart_policy import RestartPolicy

FOLDER = Path(__file__).parent
COMMAND = (sys.executable, str(FOLDER / "simulated_engine_process.py"))


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + i * 7) % VOCAB_SIZE for i in range(length))


def run(work: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def start(name: str, **arguments: object) -> EngineClient:
    return await EngineClient.start(name, command=COMMAND, **arguments)  # type: ignore[arg-type]


async def collect(client: EngineClient, add: AddRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(add)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: object, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.01)


def test_concurrent_streams_get_their_own_tokens_and_stats_follow() -> None:
    async def work() -> None:
        client = await start("ok")
        requests = [request(f"r{i}", prompt(3 + 4 * i, i), 12, temperature=0.5, seed=i) for i in range(9)]
        streams = await asyncio.gather(*(collect(client, r) for r in requests))
        for r, outputs in zip(requests, streams, strict=True):
            ids = [t for o in outputs for t in o.new_token_ids]
            assert ids == expected_tokens(r.prompt_token_ids, r.sampling)
            assert [o.finish_reason for o in outputs] == [None] * 11 + ["length"]
        stats = client.stats()
        assert (stats.num_finished, stats.num_generated_tokens, stats.num_free_blocks) == (9, 108, 64)
        assert client.info.model_name == "simulated" and client.is_healthy and client.state == "ready"
        await client.stop()
        assert client.state == "stopped" and not client.is_healthy and not is_alive(client.pid)
        with pytest.raises(WorkFailedError, match="stopped"):
            await collect(client, request("late", prompt(3)))

    run(work())


def test_bad_requests_are_refused_before_anything_is_sent() -> None:
    async def work() -> None:
        client = await start("ok", options=EngineOptions(max_seq_len=32))
        with pytest.raises(RequestError, match="40 tokens, a sequence may have 32"):
            client.generate(request("long", prompt(40)))
        stream = client.generate(request("a", prompt(3), 20))
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            client.generate(request("a", prompt(4)))
        await stream.aclose()
        assert client.stats().num_steps >= 1
        await client.stop()

    run(work())


def test_leaving_a_stream_early_or_cancelling_its_task_aborts_the_request() -> None:
    async def work() -> None:
        client = await start("slow")
        stream = client.generate(request("left", prompt(3), 100))
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(collect(client, request("cancelled", prompt(4), 100)))
        await until(lambda: client.stats().num_running == 1 and client.stats().num_aborted == 1)
        task.cancel()
        await until(lambda: client.stats().num_aborted == 2)
        assert client.stats().num_free_blocks == 64
        outputs = await collect(client, request("left", prompt(5), 2))  # the id is free again
        assert outputs[-1].finish_reason == "length"
        await client.stop()

    run(work())


def test_abort_ends_the_stream_with_reason_abort() -> None:
    async def work() -> None:
        client = await start("slow")
        outputs = []
        async for output in client.generate(request("a", prompt(3), 100)):
            outputs.append(output)
            if len(outputs) == 3:
                await client.abort("a")
        assert outputs[-1].finish_reason == "abort" and len(outputs) < 20
        await client.abort("a")
        await client.abort("unknown")
        await client.stop()

    run(work())


@pytest.mark.parametrize(
    ("name", "kind", "exit_code", "message"),
    [
        ("refuse", EngineTargetError, 3, "built for sm_90, this is sm_89"),
        ("bug", WorkFailedError, 1, "KeyError: 'unforeseen'"),
        ("exit", WorkFailedError, 1, "ended with exit code 7"),
    ],
)
def test_a_load_error_reaches_the_caller_as_it_is(
    name: str, kind: type[WorkFailedError], exit_code: int, message: str
) -> None:
    async def work() -> None:
        with pytest.raises(kind, match=message) as error:
            await start(name)
        assert error.value.exit_code == exit_code and "\n" not in str(error.value)

    run(work())


def test_the_real_process_reports_a_missing_engine_file(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(InputError, match=r"none\.engine does not exist"):
            await EngineClient.start(tmp_path / "none.engine")

    run(work())


def test_a_device_failure_fails_running_requests_and_the_engine_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        client = await start(f"fail-once {tmp_path / 'mark'}")
        first_pid = client.pid
        failed = await collect(client, request("a", prompt(3), 20))
        assert failed[-1].finish_reason == "error"
        assert failed[-1].error == "the simulated device was told to fail; send the request again"
        assert len(failed) == 4  # three tokens came before
        again = request("a", prompt(3), 20)
        outputs = await collect(client, again)  # waits for the restart
        assert [t for o in outputs for t in o.new_token_ids] == expected_tokens(prompt(3), again.sampling)
        assert client.pid != first_pid and client.is_healthy and not is_alive(first_pid)
        await client.stop()

    run(work())


def test_a_killed_process_is_restarted_and_given_up_after_three_times() -> None:
    async def work() -> None:
        client = await start("slow")
        pids = []
        for attempt in range(4):
            stream = client.generate(request(f"r{attempt}", prompt(3), 100))
            await anext(stream)
            pids.append(client.pid)
            os.kill(client.pid, signal.SIGKILL)
            last = [output async for output in stream][-1]
            assert last.finish_reason == "error" and "ended with signal 9" in str(last.error)
        await until(lambda: client.state == "failed")
        assert len(set(pids)) == 4 and not client.is_healthy
        with pytest.raises(WorkFailedError, match="the engine is failed"):
            await collect(client, request("late", prompt(3)))
        await client.stop()

    run(work())


def test_an_engine_that_fails_again_and_again_is_given_up() -> None:
    async def work() -> None:
        client = await start("fail-always", restarts=RestartPolicy(max_restarts=1))
        for name in "ab":
            outputs = await collect(client, request(name, prompt(3), 20))
            assert outputs[-1].finish_reason == "error"
        await until(lambda: not client.is_healthy)
        await client.stop()

    run(work())


@pytest.mark.parametrize("how", ["hang", "stall"])
def test_a_process_that_gets_nowhere_is_unhealthy_then_killed_and_replaced(tmp_path: Path, how: str) -> None:
    async def work() -> None:
        client = await start(f"{how}-once {tmp_path / 'mark'}", step_timeout_s=1.0)
        await asyncio.sleep(1.2)
        assert client.is_healthy  # idle silence is fine
        asked = asyncio.create_task(collect(client, request("a", prompt(3), 2)))
        await asyncio.sleep(0.1)
        assert client.is_healthy
        await until(lambda: not client.is_healthy)
        assert client.state == "ready" and not asked.done()  # told before it is too late
        outputs = await asked
        assert outputs[-1].finish_reason == "error"
        assert "had requests and moved none for 1 s, so it was killed" in str(outputs[-1].error)
        assert (await collect(client, request("b", prompt(3), 2)))[-1].finish_reason == "length"
        await client.stop()

    run(work())


def test_stop_drains_running_requests_and_aborts_those_that_take_too_long() -> None:
    async def work() -> None:
        client = await start("slow")
        short = asyncio.create_task(collect(client, request("short", prompt(3), 5)))
        long = asyncio.create_task(collect(client, request("long", prompt(3), 110)))
        await until(lambda: client.stats().num_running == 2)
        started = time.monotonic()
        stopping = asyncio.create_task(client.stop(drain_s=0.4))
        await asyncio.sleep(0)
        assert not client.is_healthy
        with pytest.raises(WorkFailedError, match="stopping"):
            await collect(client, request("late", prompt(3)))
        await stopping
        assert time.monotonic() - started < 8
        assert (await short)[-1].finish_reason == "length"
        assert (await long)[-1].finish_reason == "abort"
        assert not is_alive(client.pid)

    run(work())


def test_signals_to_the_engine_process_do_not_end_it_and_it_is_not_in_the_terminals_group() -> None:
    async def work() -> None:
        client = await start("slow")
        task = asyncio.create_task(collect(client, request("a", prompt(3), 30)))
        await until(lambda: client.stats().num_running == 1)
        assert os.getpgid(client.pid) != os.getpgid(0)
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        assert len(await task) == 30
        await client.stop()

    run(work())


def test_the_process_ends_when_its_front_is_killed_idle_or_busy() -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(FOLDER)!r})
from castiron.runtime.engine_client import EngineClient
from simulated_device import request
async def main():
    client = await EngineClient.start("slow", command={COMMAND!r})
    print(client.pid, flush=True)
    if sys.argv[1] == "busy":
        async for _ in client.generate(request("a", (1, 2, 3), 120)):
            print("token", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    for mode in ("idle", "busy"):
        front = subprocess.Popen([sys.executable, "-c", script, mode], stdout=subprocess.PIPE, text=True)
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        if mode == "busy":
            front.stdout.readline()
        assert is_alive(pid)
        front.kill()
        front.wait()
        front.stdout.close()
        deadline = time.monotonic() + 10
        while is_alive(pid):
            assert time.monotonic() < deadline, "the engine process outlived its front"
            time.sleep(0.01)


def test_an_idle_process_uses_no_processor_time() -> None:
    def cpu_ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def work() -> None:
        client = await start("ok")
        await collect(client, request("a", prompt(3), 3))
        before = cpu_ticks(client.pid)
        await asyncio.sleep(0.5)
        assert cpu_ticks(client.pid) - before <= 1
        await client.stop()

    run(work())


def test_restarts_are_counted_within_the_window_only() -> None:
    now = 0.0
    policy = RestartPolicy(max_restarts=3, window_s=600, clock=lambda: now)
    assert [policy.allow() for _ in range(4)] == [True, True, True, False]
    now = 599.0
    assert not policy.allow()
    now = 600.0
    assert [policy.allow() for _ in range(4)] == [True, True, True, False]
