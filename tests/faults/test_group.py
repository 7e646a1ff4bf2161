"""A group of ranks fails as a whole, whichever rank fails and how, and another group continues its streams.

One test in three parts: each uses the group that the part before has left, because a start takes seconds.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.builders import make_prompt
from tests.e2e.reader import Reader
from tests.engine_worker.execution.reference import write_model_of_words
from tests.faults.conftest import StartWorld, World
from tests.faults.group_site import Groups, gone, outputs

pytestmark = [pytest.mark.tp, pytest.mark.timeout(1800)]
LENGTHS = (3, 40, 200)
HANG_SECONDS = "3"
# Once a file exists, a follower with a message keeps the interpreter's lock, as a hung call does.
HANGS = """
import ctypes, os
from engine_worker.execution.ranks.step_channel import RingReceiver
receive = RingReceiver.receive
def receive_and_hang(self):
    message = receive(self)
    if os.path.exists({path!r}):
        ctypes.PyDLL(None).sleep(1000)
    return message
RingReceiver.receive = receive_and_hang
"""
# Once a file exists, a byte of a message changes in the ranks' shared memory before a follower reads it.
BREAKS = """
import os
from engine_worker.execution.ranks.step_channel import _PREFIX_BYTES, _Slots
read = _Slots.read
def read_broken(self, number):
    if os.path.exists({path!r}):
        self._map[self._start(number) + _PREFIX_BYTES] ^= 1
    return read(self, number)
_Slots.read = read_broken
"""


# Once a file exists, each message makes a follower allocate memory from the kernel, as a larger step would. Memory that
# its allocators keep may suffice for any prompt of a test.
ASKS_FOR_MEMORY = """
import os
from engine_worker.execution.ranks.step_channel import RingReceiver
receive = RingReceiver.receive
def receive_and_ask(self):
    message = receive(self)
    if os.path.exists({path!r}):
        bytearray(1 << 28)
    return message
RingReceiver.receive = receive_and_ask
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return write_model_of_words(tmp_path_factory.mktemp("models") / "tiny", **sizes)


def read(world: World, max_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> list[Reader]:
    """Return prompts of these lengths; one is computed in many steps."""
    prompts = [[20 + token % 200 for token in make_prompt(length, first=7 * length)] for length in lengths]
    return [Reader(world.client, prompt, max_tokens=max_tokens) for prompt in prompts]


def changed(directory: Path, code: str) -> Path:
    """Return a module path with which a process runs `code` first; it acts once the file `now` exists."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(code.format(path=str(directory / "now")))
    return directory


@pytest.mark.long
async def test_failed_rank_ends_its_group_and_another_continues(
    start_world: StartWorld, model_dir: Path, tmp_path: Path
) -> None:
    groups = Groups(world := await start_world(), model_dir)
    await a_follower_hangs_another_reads_a_broken_message_a_third_is_stopped(groups, tmp_path)
    await a_follower_has_no_memory_rank_0_stands_still_and_ranks_die_in_other_phases(groups, tmp_path)
    await each_rank_is_killed_while_its_group_loads_prefills_and_decodes(groups)

    (left,) = world.fleet.processes
    last = await groups.follower(left)
    world.fleet.processes[left].send_signal(signal.SIGTERM)
    assert await groups.end_of(left) == 0
    await gone(last)
    await world.nothing_is_left()


async def a_follower_hangs_another_reads_a_broken_message_a_third_is_stopped(groups: Groups, tmp_path: Path) -> None:
    world = groups.world
    groups.start("w0", "--step-timeout-seconds", HANG_SECONDS, python_path=changed(tmp_path / "hangs", HANGS))
    groups.start("w1", python_path=changed(tmp_path / "breaks", BREAKS))
    await world.has_ready("w0", "w1")
    undisturbed = await outputs(read(world, 300))

    # The step watchdog detects the first, an invalid message the second, a stop of the process the third.
    hung = await groups.follower("w0")
    (tmp_path / "hangs" / "now").touch()
    readers = [*read(world, 300), *read(world, 300)]
    assert await groups.end_of("w0") == 86
    await gone(hung)
    log = world.fleet.log("w0")
    assert "no engine step ended for 3 s: exiting" in log
    assert "in follow" in log and "engine_thread.py" in log  # stacks of both ranks
    assert await outputs(readers) == undisturbed * 2

    broken = await groups.follower("w1")
    os.kill(broken, signal.SIGTERM)  # ignored: rank 0 drains for all
    (tmp_path / "breaks" / "now").touch()
    readers = read(world, 300)
    assert await groups.end_of("w1") == 1
    log = world.fleet.log("w1")
    assert "rank 1 of 2 ended in its phase 'serve' with exit status 87" in log
    assert "its CRC32 is" in log

    asking = changed(tmp_path / "asks", ASKS_FOR_MEMORY)
    groups.start("w2", python_path=asking)
    groups.start("w3", python_path=asking)
    assert await outputs(readers) == undisturbed
    await world.has_ready("w2", "w3")
    readers = read(world, 300)
    await world.all_have(readers, 20)
    stopped = await groups.follower(holder := await groups.holder(readers[0]))
    os.kill(stopped, signal.SIGSTOP)
    assert await groups.end_of(holder) == 1  # in the middle of a step, whose timeout is a minute
    await gone(stopped)
    assert "rank 1 of 2 does not respond in its phase 'serve': stopped by a signal" in world.fleet.log(holder)
    assert await outputs(readers) == undisturbed
    print(f"the longest silence was {max(reader.longest_silence_seconds for reader in readers):.2f} s")


async def a_follower_has_no_memory_rank_0_stands_still_and_ranks_die_in_other_phases(
    groups: Groups, tmp_path: Path
) -> None:
    (left,) = (world := groups.world).fleet.processes
    await groups.refuse_memory(left)
    (tmp_path / "asks" / "now").touch()
    readers = read(world, 200, (3, 700))
    assert await groups.end_of(left) == 1
    log = world.fleet.log(left)
    assert "rank 1 of 2 ended in its phase 'serve'" in log and "all ranks end" in log and "MemoryError" in log
    groups.start("w4")
    groups.start("w5")
    assert await outputs(readers) == await outputs(read(world, 200, (3, 700)))
    await world.has_ready("w4", "w5")

    undisturbed = await outputs(read(world, 200))
    readers = read(world, 200)
    await world.all_have(readers, 20)
    stopped = world.fleet.processes[holder := await groups.holder(readers[0])]
    stopped.send_signal(signal.SIGSTOP)
    assert await outputs(readers) == undisturbed
    stopped.send_signal(signal.SIGCONT)
    await world.logged(holder, ": registered", times=2)  # fenced; the group is whole

    assert await groups.kill_while("x0", "load", rank=0) == -signal.SIGKILL
    assert await groups.kill_while("x1", "serve", rank=1) == 1  # entered before rank 0's warm-up
    assert "rank 1 of 2 ended in its phase 'serve' by signal 9; all ranks end" in world.fleet.log("x1")

    readers = read(world, 600)
    await world.all_have(readers, 20)
    draining = await groups.holder(readers[0])
    world.fleet.processes[draining].send_signal(signal.SIGTERM)
    await world.logged(draining, "draining")
    assert await groups.kill(draining, rank=1) == 1
    assert await outputs(readers) == await outputs(read(world, 600))
    await world.nothing_is_left()


async def each_rank_is_killed_while_its_group_loads_prefills_and_decodes(groups: Groups) -> None:
    world = groups.world
    groups.start("w6")
    await world.has_ready("w6")
    undisturbed = await outputs(read(world, 200))

    readers = read(world, 200)
    await world.all_have(readers, 20)
    holder = await groups.holder(readers[0])
    assert await groups.kill(holder, rank=1) == 1
    log = world.fleet.log(holder)
    assert "rank 1 of 2 ended in its phase 'serve' by signal 9; all ranks end" in log
    assert "failed; requeued its requests: ReapSummary(requeued=" in log
    groups.start("w7")
    assert await groups.kill("w7", rank=1) == 1  # while it loads
    assert "rank 1 of 2 ended in its phase" in world.fleet.log("w7")
    groups.start("w8")
    assert await outputs(readers) == undisturbed

    await world.has_ready("w8")
    readers = read(world, 200)
    await world.all_have(readers[:1], 1)  # the other prompts are being prefilled
    assert await groups.kill(await groups.holder(readers[0]), rank=0) == -signal.SIGKILL
    assert await outputs(readers) == undisturbed
    assert max(await world.attempts(readers)) == 2
    await world.nothing_is_left()
