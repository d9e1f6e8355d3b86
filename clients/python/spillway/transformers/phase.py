"""Tells the tokens of a prompt, which are attended exactly, from those of decoding."""

from __future__ import annotations

# Forwards of a prompt after which one token alone may be its last chunk.
_CHUNKS_BEFORE_ONE_TOKEN = 2


class Phase:
    """Follows what transformers does with a cache; for one thread.

    transformers does not say what a forward is for. Decoding brings one token
    at a time, and several only as candidates of assisted decoding, which says
    that it begins (`activate_past_recording`) and crops the cache after each
    of its forwards, be it by nothing. So the tokens of a forward are of a
    prompt where

    - the cache is empty, or
    - there are several, and assisted decoding has not cropped the cache just
      before, or
    - there is one, and two or more forwards of a prompt came directly before:
      it may be the last chunk of a prompt in chunks. The first step after a
      prompt of several chunks cannot be told from that, and is attended
      exactly too.

    One token after a single forward of a prompt is taken for the first step
    of decoding, which it is but where the prompt has one token more than a
    chunk. A prompt in chunks of one token is decoding.
    """

    def __init__(self) -> None:
        # Forwards of a prompt directly before.
        self._chunk_count = 0
        self._assisted = False
        # Whether the cache was cropped since the last forward.
        self._cropped = False

    def is_prompt(self, length: int, token_count: int) -> bool:
        """Tells what a forward that begins is for.

        Args:
            length: Positions in the cache before it.
            token_count: Positions that it brings.
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
        """Notes that the forwards after the next crops are of candidates."""
        self._assisted = True

    def note_crop(self) -> None:
        """Notes that tokens were removed, or none."""
        self._cropped = True
        self._chunk_count = 0

    def end_prompt(self) -> None:
        """Notes that the rows were changed: the prompt is over."""
        self._chunk_count = 0

    def fork(self) -> Phase:
        """A copy's."""
        made = Phase()
        made._chunk_count = self._chunk_count
        return made
