"""What sequences take from the prefix cache and leave to it: its index, the runner's memory, and the disk."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Final

from emlxd.graph.batch import BLOCK_TOKENS
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.prefix_cache import Checkpoints, PrefixCache
from emlxd.worker.runner import Runner
from emlxd.worker.sequence import Sequence

SPILLED_A_STEP: Final = 2  # blocks or states


class PrefixReuse:
    """K/V can be taken up at the end of any block; a recurrent state only where one was kept.

    A state is kept at the end of the last whole block of a prompt and of an answer, for prompts that go on
    from there, and where a prompt parts from those before it, for others that begin alike. Where layers keep
    rings, blocks are saved along the way, before they are overwritten. ``unspilled`` says whether blocks or
    states wait to be handed to the disk.
    """

    def __init__(self, runner: Runner, disk: DiskCache | None = None, max_draft: int = 0) -> None:
        """``max_draft`` is how many tokens past a sequence's own a step may have written."""
        self._max_draft = max_draft
        self._runner = runner
        self._disk = disk
        self._blocks = PrefixCache(runner.blocks)
        self.checkpoints = Checkpoints(runner.checkpoints)
        self._unspilled: list[bytes] = []

    @property
    def query_tokens(self) -> int:
        return self._blocks.query_tokens

    @property
    def hit_tokens(self) -> int:
        return self._blocks.hit_tokens

    @property
    def unspilled(self) -> bool:
        return bool(self._unspilled)

    def clear(self) -> None:
        """Forgets what was in the runner's memory."""
        self._blocks.clear()
        self.checkpoints.clear()
        self._unspilled.clear()

    def restore(self, sequence: Sequence) -> None:
        """Copies what is known of a sequence's context to its slot, so that it need not be computed."""
        keys = sequence.keys.of(sequence.context[:-1])  # one token is left over, to be computed
        if self._runner.recurrent:
            held = self._held(keys)
            blocks = self._fetch(sequence, keys[: self._last_state(keys[:held])])
            # A block that proves to be damaged on the disk cuts them short.
            blocks = blocks[: self._last_state(keys[: len(blocks)])]
            if self._runner.checkpoints:
                sequence.stops = {count * BLOCK_TOKENS for count in (held, len(keys)) if count > len(blocks)}
        else:
            blocks = self._fetch(sequence, keys)
        if not blocks:
            return
        self._runner.load_blocks(sequence.slot, blocks)
        if (checkpoint := self.checkpoints.find(state_key(keys[len(blocks) - 1]))) is not None:
            self._runner.load_state(sequence.slot, checkpoint)
        sequence.prefilled = sequence.cached = len(blocks) * BLOCK_TOKENS

    def keep_prompt(self, sequence: Sequence) -> None:
        """Leaves what a chunk of prefill has brought: a state at its end, or the K/V of the whole prompt."""
        done = sequence.prefilled
        if self._runner.recurrent and done in sequence.stops and done % BLOCK_TOKENS == 0:
            self._keep_state(sequence, sequence.keys.of(sequence.context[:done])[-1])
        if not sequence.prompt_left or self._runner.ring is not None:
            self._keep_blocks(sequence, sequence.keys.of(sequence.context[:done]))

    def keep_step(self, sequence: Sequence, written: int) -> None:
        """Copies the state that a decode step leaves at the end of a block, in place of the copy before it.

        What the tokens are is known when the step has been read.
        """
        if not self._runner.recurrent or written % BLOCK_TOKENS:
            return
        if sequence.checkpoint is None:
            sequence.checkpoint = self.checkpoints.lend()
        if sequence.checkpoint is not None:
            self._runner.save_state(sequence.slot, sequence.checkpoint)
            sequence.state_at = written

    def keep_answer(self, sequence: Sequence) -> None:
        """Leaves the K/V of an answer, or the last state that was copied and the K/V up to there.

        The last token has no K/V yet, unless a step was on its way: nobody asked the model what follows it.
        Such a step may also have taken the state past the answer's end.
        """
        tokens = (*sequence.request.prompt, *sequence.answer)
        if not self._runner.recurrent:
            self._keep_blocks(sequence, sequence.keys.of(tokens[:-1]))
        elif sequence.checkpoint is not None and sequence.state_at <= len(tokens):
            keys = sequence.keys.of(tokens[: sequence.state_at])
            key = state_key(keys[-1])
            if self.checkpoints.keep(sequence.checkpoint, key):
                self._note([key])
            sequence.checkpoint = None  # it is others' now: the next state goes elsewhere
            self._keep_blocks(sequence, keys)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: the copy of its state that has not been left to others is of no use."""
        if sequence.checkpoint is not None:
            self.checkpoints.take_back(sequence.checkpoint)
            sequence.checkpoint = None

    def keep_along(self, sequence: Sequence) -> None:
        """Leaves a block that an answer has completed, if it would be gone at the answer's end."""
        written = len(sequence.request.prompt) + len(sequence.answer) - 1
        if self._runner.ring is not None and written % BLOCK_TOKENS == 0:
            self.keep_answer(sequence)

    def spill(self) -> None:
        """Hands a few new blocks to the disk: reading one from the device takes a moment."""
        if self._disk is None:
            return
        some, self._unspilled = self._unspilled[:SPILLED_A_STEP], self._unspilled[SPILLED_A_STEP:]
        for key in some:
            if (block := self._blocks.where(key)) is not None:
                self._disk.put(key, self._runner.read_block(block))
            elif (checkpoint := self.checkpoints.where(key)) is not None:
                self._disk.put(key, self._runner.read_state(checkpoint))

    def _held(self, keys: Rows[bytes]) -> int:
        """How many of the first blocks are in memory or on the disk."""
        on_disk = self._disk or ()
        missing = (n for n, key in enumerate(keys) if self._blocks.where(key) is None and key not in on_disk)
        return next(missing, len(keys))

    def _last_state(self, keys: Rows[bytes]) -> int:
        """After how many of the blocks there is a state, in memory when this returns; 0 for none."""
        return next((n for n in range(len(keys), 0, -1) if self._has_state(state_key(keys[n - 1]))), 0)

    def _has_state(self, key: bytes) -> bool:
        if self.checkpoints.find(key) is not None:
            return True
        content = self._disk.get(key) if self._disk else None
        if content is None or len(content) != self._runner.checkpoint_bytes:
            return False
        if (checkpoint := self.checkpoints.add(key)) is None:
            return False
        self._runner.write_state(checkpoint, content)
        return True

    def _fetch(self, sequence: Sequence, keys: Rows[bytes]) -> list[int]:
        """The blocks of ``keys``, with which its context begins: from memory, then from the disk."""
        blocks = self._blocks.match(keys, len(sequence.context))
        if self._disk is None:
            return blocks
        known, found = len(blocks), []
        for key in keys[known:]:
            if (block := self._disk.get(key)) is None or len(block) != self._runner.block_bytes:
                break
            found.append(block)
        saving = self._blocks.insert(keys[: known + len(found)]) if found else None
        if saving is None:
            return blocks
        self._runner.write_blocks(saving.blocks, found[: len(saving.blocks)])
        return blocks + saving.blocks

    def _keep_blocks(self, sequence: Sequence, keys: Rows[bytes]) -> None:
        if self._overwritten(sequence, keys):
            return
        saving = self._blocks.insert(keys)
        if saving:
            self._runner.save_blocks(sequence.slot, saving.first, saving.blocks)
            self._note(saving.keys)

    def _overwritten(self, sequence: Sequence, keys: Rows[bytes]) -> bool:
        """Whether rings no longer have the first of its blocks that is new."""
        if self._runner.ring is None:
            return False
        first = self._blocks.known(keys) * BLOCK_TOKENS
        return first + self._runner.ring < sequence.written + self._max_draft

    def _keep_state(self, sequence: Sequence, key: bytes) -> None:
        checkpoint = self.checkpoints.add(state_key(key))
        if checkpoint is not None:
            self._runner.save_state(sequence.slot, checkpoint)
            self._note([state_key(key)])

    def _note(self, keys: Rows[bytes]) -> None:
        """New blocks or states are to be handed to the disk."""
        if self._disk:
            self._unspilled += keys


def state_key(key: bytes) -> bytes:
    """What the state at a block's end is known by, given the block's key."""
    return key + b"state"
