"""Opens every page of the site that scripts/docs has made in Debian's chromium, and searches in it. Called by scripts/docs --check.

usage: docs_check.py SITE

What is wrong: a link within the site to a page or an anchor that is not there, a message on the console of an error, a page that is wider
than a window or a telephone, a search that finds nothing.
"""

import functools
import http.server
import re
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

from playwright.sync_api import sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = {"window": 1280, "telephone": 390}
HEIGHT = 800
LIMIT_MS = 60_000
# What is typed into the search of a page, and a page that it must find.
SEARCHES = [
    ("index.html", "no_sync", "docs/ddp.html"),
    ("index.html", "Ddp::new", "docs/ddp.html"),
    ("index.html", "all_reduce", "docs/from-pytorch.html"),
    ("index.html", "TopK", "reference/flow_ddp.html"),
    ("docs/ddp.html", "--max-restarts", "docs/flags.html"),
    ("rust/flow_ddp/index.html", "no_sync", "struct.Ddp.html#method.no_sync"),
    ("python/flow_launch.html", "elastic_launch", "flow_launch.html#elastic_launch"),
]
LINE = re.compile(r"<a href=#\d+ id=(\d+)")
SEEN = """() => ({
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    anchors: [...document.querySelectorAll("[id], a[name]")].map(each => each.id || each.name),
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def main(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}/"
    chromium = shutil.which("chromium") or sys.exit("docs: no chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        check = Check(browser.new_page(), root, Path(site))
        check.pages()
        for start, text, found in SEARCHES:
            check.search(start, text, found)
        browser.close()
    if check.wrong:
        sys.exit("\n".join(["docs: wrong:", *check.wrong]))
    print(f"docs: {len(check.anchors)} pages, {check.links} links and {len(SEARCHES)} searches are right")


class Check:
    def __init__(self, page, root, site):
        self.page, self.root, self.site, self.wrong, self.anchors, self.links = page, root, site, [], {}, 0
        page.set_default_timeout(LIMIT_MS)
        page.on("console", lambda message: message.type == "error" and self.says(f"the console: {message.text}"))
        page.on("pageerror", lambda error: self.says(f"the console: {error}"))

    def says(self, what):
        self.wrong.append(f"{self.page.url.removeprefix(self.root)}: {what}")

    def pages(self):
        """Opens all pages that links lead to from the first one."""
        targets = {f"{self.root}index.html": "the start"}
        wanted = []
        while targets:
            url, origin = targets.popitem()
            if url.startswith(f"{self.root}rust/src/"):
                self.anchors[url] = self.lines(url, origin)
                continue
            response = self.page.goto(url, wait_until="load")
            if response.status != 200:
                self.wrong.append(f"{origin}: a link to {url.removeprefix(self.root)}, which is not there")
                self.anchors[url] = set()
                continue
            if response.headers["content-type"] != "text/html":
                self.anchors[url] = set()
                continue
            seen = self.page.evaluate(SEEN)
            self.anchors[url] = set(seen["anchors"])
            self.is_as_wide()
            for link in set(seen["links"]):
                target, anchor = urldefrag(link)
                target = target.partition("?")[0]
                if not target.startswith(self.root):
                    continue
                wanted.append((url, target, anchor))
                if target not in self.anchors:
                    targets.setdefault(target, url.removeprefix(self.root))
        self.links = len(wanted)
        for url, target, anchor in wanted:
            # The page of a type that is another name of std's has parts of std's documentation, with their links.
            if "/type." in target and target == url:
                continue
            # An anchor in rustdoc's pages of sources is a line, or `first-last`.
            name = anchor.split("-")[0] if target.startswith(f"{self.root}rust/src/") else anchor
            if name and self.anchors[target].isdisjoint([name, unquote(name)]):
                self.wrong.append(f"{url.removeprefix(self.root)}: a link to {target.removeprefix(self.root)}#{anchor}, which is not there")

    def lines(self, url, origin):
        """The lines in one of rustdoc's many pages of sources, which is not opened."""
        page = self.site / url.removeprefix(self.root)
        if not page.exists():
            self.wrong.append(f"{origin}: a link to {url.removeprefix(self.root)}, which is not there")
            return set()
        return set(LINE.findall(page.read_text()))

    def is_as_wide(self):
        for name, width in WIDTHS.items():
            self.page.set_viewport_size({"width": width, "height": HEIGHT})
            wide = self.page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                self.says(f"{wide} pixels wide on a {name} of {width}")

    def search(self, start, text, found):
        self.page.set_viewport_size({"width": WIDTHS["window"], "height": HEIGHT})
        self.page.goto(self.root + start, wait_until="load")
        self.page.keyboard.press("s")
        self.page.locator("input[type=search]").first.press_sequentially(text)
        try:
            self.page.wait_for_selector(f'a[href*="{found}"]:visible')
        except Exception as error:
            self.says(f"a search for {text} does not find {found}: {error}")


main(sys.argv[1])
