"""Long lines on a terminal break at spaces; commands to copy stand on their own lines."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.terminal import SafeConsole
from launcher.cli.wrapping import lines

RUN = "digits-20261125-095158-4c7e"


def shown(markup: str, *, terminal: bool = True) -> str:
    file = io.StringIO()
    console = SafeConsole(
        file=file, width=80, force_terminal=terminal, color_system=None, soft_wrap=True, highlight=False
    )
    console.print(markup)
    return file.getvalue()


def test_commands_stand_on_their_own_lines_if_the_text_is_too_long() -> None:
    text = f"detached from {RUN}, which is still running. Reattach: launcher logs {RUN}   Stop: launcher down {RUN}"
    assert shown(f"[dim]launcher:[/] {text}").splitlines() == [
        f"launcher: detached from {RUN}, which is still running.",
        "  Reattach:",
        f"    launcher logs {RUN}",
        "  Stop:",
        f"    launcher down {RUN}",
    ]
    assert shown(text, terminal=False) == f"{text}\n"
    assert shown(f"to stop it: launcher down {RUN}") == f"to stop it: launcher down {RUN}\n"


def test_a_fix_keeps_its_indentation_and_its_alternatives() -> None:
    fix = f"wait for it: --wait; or stop that run: launcher down {RUN} --nodes gpu-a,gpu-b; or choose another port"
    assert shown(f"[bold]error[/] gpu-a: in use\n  -> {fix}").splitlines() == [
        "error gpu-a: in use",
        "  -> wait for it: --wait; or stop that run:",
        f"      launcher down {RUN} --nodes gpu-a,gpu-b",
        "    or choose another port",
    ]


@given(st.text(st.sampled_from("ab .;:->\n漢"), max_size=300), st.integers(1, 100))
def test_no_word_is_lost_or_broken(text: str, width: int) -> None:
    parts = [text[line.start : line.end] for line in lines(text, width)]
    assert " ".join(parts).split() == text.split()


@given(st.lists(st.sampled_from(["launcher", "logs", "run:", "a;", "->", "word", "(x)"]), max_size=40))
def test_only_what_separates_a_command_is_lost(words: list[str]) -> None:
    text = " ".join(words)
    parts = [text[line.start : line.end] for line in lines(text, 20)]
    assert " ".join(parts).replace(";", "").split() == text.replace(";", "").split()
