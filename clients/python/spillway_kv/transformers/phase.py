"""Distinguishes the tokens of a prompt, which are attended exactly, from those of decoding."""

from __future__ import annotations

# After this many forward passes of a prompt, a single token may be its last chunk.
_CHUNKS_BEFORE_ONE_TOKEN = 2


class Phase:
    """Infers the purpose of forward passes from transformers' calls of a cache. For one thread.

    transformers does not tell a cache what a forward pass is for. Decoding has one token at a time.
    It has several only as candidates of assisted decoding, which announces itself
    (`activate_past_recording`) and crops the cache after each of its forward passes, even if by 0
    tokens. So the tokens of a forward pass belong to a prompt if

    - the cache is empty, or
    - there are several, and assisted decoding has not cropped the cache just before, or
    - there is one, directly after two or more forward passes of a prompt: it may be the last
      chunk. The first decode step after a prompt of several chunks looks the same, and is
      attended exactly too.

    One token after a single forward pass of a prompt counts as the first decode step. This is wrong
    only if the prompt has one token more than a chunk. A prompt in chunks of one token counts as
    decoding.
    """

    def __init__(self) -> None:
        # Number of forward passes of a prompt directly before.
        self._chunk_count = 0
        self._assisted = False
        # Whether the cache was cropped since the last forward pass.
        self._cropped = False

    def is_prompt(self, length: int, token_count: int) -> bool:
        """Returns whether a forward pass that begins has tokens of a prompt.

        Args:
            length: Positions in the cache before the forward pass.
            token_count: Positions that the forward pass adds.
        """
        candidates = self._assisted and self._cropped
        self._cropped = False
        if length == 0:
            prompt = True
        elif token_count > 1:
            prompt = not candidates
        else:
            prompt = self._chunk_count >= _CHUNKS_BEFORE_ONE_TOKEN
        goes_on = prompt and (token_count > 1 or length == 0)
        self._chunk_count = self._chunk_count + 1 if goes_on else 0
        return prompt

    def begin_generation(self) -> None:
        """Notes a call of generate()."""
        self._assisted = False

    def begin_assisted_decoding(self) -> None:
        """Notes that the forward passes after the next crops have candidates."""
        self._assisted = True

    def note_crop(self) -> None:
        """Notes a crop, which may have removed no tokens."""
        self._cropped = True
        self._chunk_count = 0

    def end_prompt(self) -> None:
        """Notes that the rows were changed, which ends a prompt."""
        self._chunk_count = 0

    def fork(self) -> Phase:
        """Returns the phase of a copy of the cache."""
        made = Phase()
        made._chunk_count = self._chunk_count
        return made
