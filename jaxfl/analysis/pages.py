"""Result pages: tables, pictures and numbers in sentences rewritten from the files that lie beside a page.

A comment in a page says what the table or the picture after it shows:

    <!-- table fig7 rows=step_size columns=iterations where=method:PrivSGP-VR -->
    <!-- picture fig7 x=iterations lines=step_size title="MNIST, 50 nodes" -->
    <!-- picture fig9 curves=case y=test_accuracy title="MNIST, 50 nodes" -->

A comment in a sentence says what the number behind it is, also as a difference of two, seed against seed:

    DPFL has <!-- value digits where=method:DPFL,target_epsilon:8 best=step_size -->82.7 %,
    by <!-- value digits where=method:DPFL,target_epsilon:8 less=method:PrivSGP best=step_size -->6.4 ± 0.9 points more.

`page_tables.Directive` lists the options. A directive reads NAME_results.csv, one row for each case and seed, or else
NAME.csv, or for curves NAME_metrics.jsonl. Several names with a + between them are read as one file. An option that a
file lacks comes from NAME_config.json. The column test_accuracy_best is each seed's highest evaluation in
NAME_metrics.jsonl.

A comment `<!-- words KEY:WORDS ... -->` names what stands below it: cases, parts of their names between ", ", values
and columns. In a KEY {} stands for any text, and in its WORDS for the same; a part whose words are empty is left out.
"""

from __future__ import annotations

from pathlib import Path

from jaxfl.analysis.page_pictures import draw
from jaxfl.analysis.page_tables import Directive, table, words_of
from jaxfl.analysis.page_values import with_values


def rewritten(page: Path, *, pictures: bool) -> tuple[str, list[Path]]:
    """The text of a page with its tables and numbers made anew, and its pictures, drawn if asked for.

    Raises:
        ArgumentError: a directive that cannot be read, or a file that is missing.
    """
    lines, written, drawn = page.read_text(encoding="utf-8").splitlines(), list[str](), list[Path]()
    words = dict[str, str]()
    place = 0
    while place < len(lines):
        written.append(with_values(lines[place], page.parent))
        directive = Directive.parse(lines[place])
        words |= words_of(lines[place])
        place += 1
        if directive is None:
            continue
        directive = directive._replace(words=words)
        if directive.kind == "table":
            written += table(directive, page.parent)
            while place < len(lines) and lines[place].startswith("|"):
                place += 1
        elif pictures:
            drawn.append(draw(directive, page.parent, lines[place] if place < len(lines) else ""))
    return "\n".join(written) + "\n", drawn
