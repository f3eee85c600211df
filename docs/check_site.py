"""Looks at a built site in headless Chromium: ``python docs/check_site.py build/site [chromium]``.

It reports errors of the console, links within the site that lead nowhere, pages that are wider than a window of 400 or 1400 pixels,
text that is hard to read on its background, light and dark, and a word that the search does not find.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SEARCHES = {"verify": "/verify.html", "notebook": "/notebooks.html", "contract": "/contract.html"}
"""Words that a reader types, and a page that the results have."""

CHECK = """
<body><pre id="found">unfinished</pre><script>
const pages = PAGES, found = [];
const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                         return .2126 * r + .7152 * g + .0722 * b; };
const look = (page, width, theme) => new Promise(done => {
  localStorage.setItem("theme", theme);
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    const inner = frame.contentDocument, where = `${page} at ${width}, ${theme}: `;
    const wide = inner.documentElement.scrollWidth;
    if (wide > width) found.push(where + `${wide} pixels wide`);
    const style = frame.contentWindow.getComputedStyle(inner.body);
    const [low, high] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
    if ((high + .05) / (low + .05) < 4.5) found.push(where + `${style.color} on ${style.backgroundColor}`);
    for (const link of width == 400 || theme == "dark" ? [] : inner.querySelectorAll("a[href], img[src], script[src], link[href]")) {
      const to = new URL(link.href || link.src, frame.contentWindow.location);
      if (to.origin == location.origin) links.set(to.pathname + to.hash, page);
    }
    frame.remove();
    done();
  };
  frame.src = "/" + page;
  document.body.append(frame);
});
const search = (word, page) => new Promise(done => {
  const frame = document.createElement("iframe");
  let looks = 0;
  const result = () => {
    const results = [...frame.contentDocument.querySelectorAll("#search-results ul.search li a")];
    const shown = results.some(link => new URL(link.href, frame.contentWindow.location).pathname === page);
    if (!shown && looks++ < 100) return setTimeout(result, 100);
    if (!shown) found.push(`search for ${word}: ${results.length} results without ${page}`);
    frame.remove();
    done();
  };
  frame.onload = () => {
    frame.onload = result;
    const field = frame.contentDocument.querySelector("input[name=q]");
    field.value = word;
    field.form.submit();
  };
  frame.src = "/index.html";
  document.body.append(frame);
});
const links = new Map(), texts = new Map();
(async () => {
  for (const theme of ["light", "dark"]) for (const width of [400, 1400]) for (const page of pages) await look(page, width, theme);
  for (const [word, page] of SEARCHES) await search(word, page);
  for (const [link, page] of links) {
    const [path, hash] = link.split("#");
    if (!texts.has(path)) texts.set(path, await fetch(path).then(r => r.ok ? r.text() : null));
    const text = texts.get(path), id = decodeURIComponent(hash || "");
    if (text === null) found.push(`${page}: ${link} does not exist`);
    else if (id && !text.includes(`id="${id}"`)) found.push(`${page}: ${link} has no such place`);
  }
  document.getElementById("found").textContent = JSON.stringify({pages: pages.length, links: links.size, found});
  document.title = "done";
})();
</script></body>
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site, and the page that looks at all others."""

    check = ""

    def do_GET(self) -> None:
        if self.path != "/check.html":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.check.encode())
        return None

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A frame that is removed may leave a picture half sent: that is no problem of the site."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def main(site: Path, browser: str) -> int:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts)
    Quiet.check = CHECK.replace("PAGES", json.dumps(pages)).replace("SEARCHES", json.dumps(list(SEARCHES.items())))
    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}"]
        address = f"http://127.0.0.1:{server.server_port}/check.html"
        command = [browser, *options, "--virtual-time-budget=600000", "--timeout=120000", "--dump-dom", address]
        seen = subprocess.run(command, capture_output=True, text=True, timeout=240)
    server.shutdown()
    text = unescape(re.search(r'<pre id="found">(.*?)</pre>', seen.stdout, re.DOTALL)[1])  # type: ignore[index]
    result = json.loads(text)
    console = sorted({line.split("CONSOLE")[1] for line in seen.stderr.splitlines() if "CONSOLE" in line})
    for line in [*result["found"], *console]:
        print(line)
    print(f"{result['pages']} pages, {result['links']} links: {len(result['found']) + len(console)} problems")
    return bool(result["found"] or console)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *(sys.argv[2:] or ["chromium"])))
