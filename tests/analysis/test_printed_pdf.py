"""A browser prints the report to a PDF, and the text of the PDF has all that is folded or long on a screen.

The browser is the one that JAXFL_TESTS_BROWSER names, or Chrome, Chromium or Edge. test_report.py counts the same in
the page itself, where no browser can be had.
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from test_report import make_run

from jaxfl.analysis.report import write_report

NAMES = ("google-chrome", "google-chrome-stable", "chromium", "chromium-browser", "chrome", "microsoft-edge", "msedge")
BROWSER = next(filter(None, map(shutil.which, (os.environ.get("JAXFL_TESTS_BROWSER", ""), *NAMES))), None)
NUM_SITES = 45


@pytest.mark.skipif(BROWSER is None, reason="needs a browser that prints PDFs")
def test_a_printed_pdf_has_all_assumptions_and_sites(tmp_path):
    import pypdf

    run = make_run(tmp_path)
    rows = [f"{case},0,hospital {k},60,2.5,0.1,0.9" for case in "AB" for k in range(NUM_SITES)]
    heading = "case,seed,site,samples,dp_epsilon,noise_std,test_accuracy"
    (run / "sites.csv").write_text("\n".join([heading, *rows]) + "\n")
    summary = json.loads((run / "summary.json").read_text())
    assumptions = [f"assumption number {k} holds" for k in range(12)]
    for row in summary["cases"].values():
        row["privacy"][0]["assumptions"] = assumptions
    (run / "summary.json").write_text(json.dumps(summary))
    page = tmp_path / "page.html"
    write_report([run], page)
    pdf = tmp_path / "page.pdf"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--print-to-pdf={pdf}", page.as_uri()]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    pages = [" ".join(part.extract_text().split()) for part in pypdf.PdfReader(pdf).pages]
    text = " ".join(pages)
    assert all(text.count(assumption) == 1 for assumption in assumptions)
    assert len(re.findall(r"hospital \d+", text.partition(" Sites ")[2])) == 2 * NUM_SITES
    assert all(assumption in pages[0] for assumption in assumptions), "claims stand on the first page"
