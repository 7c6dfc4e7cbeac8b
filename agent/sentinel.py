"""Whether a command ends a task by what it says, and does not only show it. Pure."""

import re

_UNTIL_ITS_END = (
    r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|>&\d|\b2>>?[ \t]*[\w./-]+|[^;&\n>"'\\])*"""
    r"""(?=;|\n|&(?!>)|\Z)(?![^\n]*(?:;\s*\}}|\))\s*>)"""
)
_SAYING = (
    r"""(?:^|[;&|({{]|\b(?:then|do|else)\s)[ \t]*(?:echo(?:\s+-\w+)*|printf(?:\s+--)?(?:\s+["']?%[sb]\\n["']?)?)"""
    r"""\s+\$?(?:"{0}(?:\\.|[^"\\])*"|'{0}[^']*'|{0})""" + _UNTIL_ITS_END,
    r"""\bprint\w*\(\s*["']{0}(?:[^>\n]|>&\d|\b2>)*$""",
    r"""^(?:[^>\n]|\b2>)*<<-?[ \t]*["'\\]?\w(?:[^>\n]|>&\d|\b2>)*\n[ \t]*{0}[ \t]*$""",
)
"""Ways to say a word, {0}. Up to the end of its pipeline nothing is written into a file."""


def says(command: str, word: str) -> bool:
    """Whether a command says a word itself, as the first of what `echo`, `printf`, `print(` or a here-document prints,
    and not into a file: not one that shows a file in which it stands, or only names it."""
    return bool(word) and any(re.search(form.format(re.escape(word)), command, re.MULTILINE) for form in _SAYING)
