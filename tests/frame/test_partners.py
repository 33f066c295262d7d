"""What passes through to standard error beside a partner's death, and what becomes a sentence."""

import io

import pytest

from jaxfl.frame.partners import GOES_ON, GONE, pass_on

TROUBLE = (
    b"E1127 22:49:24.516423   11360 coordination_service_agent.cc:289] Polled an error from coordination service\n"
)
FATAL = b"F1127 22:49:24.516493   11360 client.h:80] Terminating process because the JAX distributed service detected\n"
STACK = b"*** Check failure stack trace: ***\n    @     0x7fb2d3540634  absl::LogMessage::SendToLog()\n"
SENTENCE = f"{GONE}{GOES_ON}\n".encode()


class Pieces(io.BytesIO):
    """A pipe that gives its pieces one after the other."""

    def __init__(self, pieces):
        super().__init__()
        self._pieces = iter(pieces)

    def read(self, size: int | None = -1) -> bytes:
        return next(self._pieces, b"")


def passed(*pieces):
    target = io.BytesIO()
    pass_on(Pieces(pieces), target)
    return target.getvalue()


@pytest.mark.parametrize("cut", range(1, 240, 7))
def test_a_partners_death_is_one_sentence_wherever_its_text_is_cut(cut):
    text = b"before\n" + TROUBLE + b"1\nThe tasks have crashed.\n" + FATAL + STACK
    assert passed(text[:cut], text[cut:]) == b"before\n" + SENTENCE


def test_the_sentence_of_python_stands_and_the_page_behind_it_goes():
    message = GONE.encode() + b" (Connection closed by peer)" + GOES_ON.encode() + b"\n"
    assert passed(message + TROUBLE, FATAL, STACK) == message


@pytest.mark.parametrize(
    "pieces",
    [
        (b"Epo", b"ch 3\nprompt> ", b"answer\r", b"W\n"),
        (b"warning: E1127 is no code\n", b"E1127 alone"),
        (TROUBLE + b"nothing came of it\n", b"the end"),
    ],
)
def test_everything_else_passes(pieces):
    assert passed(*pieces) == b"".join(pieces)


def test_a_prompt_is_shown_before_its_line_ends():
    target, seen = io.BytesIO(), []

    def pieces():
        yield b"prompt> "
        seen.append(target.getvalue())

    pass_on(Pieces(pieces()), target)
    assert seen == [b"prompt> "]
