"""When the page of a running daemon is first painted in Chromium, and how much it loads for that.

python benchmarks/first_paint.py [http://127.0.0.1:8420]

Each load is in a window of its own, so nothing is cached. It takes the extra `browser` and a chromium.
"""

from __future__ import annotations

import shutil
import statistics
import sys

from playwright.sync_api import sync_playwright

LOADS = 20
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
PAINTED = "() => performance.getEntriesByName('first-contentful-paint').length > 0"
FOUND = """() => {
  const files = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  const loaded = files.filter((file) => file.initiatorType !== "fetch");
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  return [paint.startTime, loaded.reduce((sum, file) => sum + file.transferSize, 0), loaded.length];
}"""


def main(url: str) -> None:
    paints = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for _ in range(LOADS):
            page = browser.new_context().new_page()
            page.goto(url)
            page.wait_for_function(PAINTED)
            paint, size, files = page.evaluate(FOUND)
            paints.append(paint)
            page.context.close()
        browser.close()
    print(f"first paint: median {statistics.median(paints):.0f} ms, longest {max(paints):.0f} ms")
    print(f"{size:,} bytes in {files} files")


main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8420")
