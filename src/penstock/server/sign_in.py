"""The page that asks for the token when /docs is opened in a browser, and its script.

A browser sends no bearer token with a link. So the page fetches the documentation with the token
and replaces itself with it. Invariants: neither the page nor the script holds a secret, so both are
served without the token; the page's policy allows scripts of the broker only; the token is kept in
the sessionStorage of the tab and nowhere else. Must not know what the documentation says.
"""

from __future__ import annotations

SCRIPT_PATH = "/docs/sign-in.js"

PAGE_HEAD = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\n"
    b"referrer-policy: no-referrer\r\n"
    b"cache-control: no-store\r\n"
    b"vary: Accept, Authorization\r\n"
)

SCRIPT_HEAD = (
    b"content-type: text/javascript; charset=utf-8\r\n"
    b"x-content-type-options: nosniff\r\n"
    b"cache-control: no-cache\r\n"
)

PAGE = f"""<!doctype html><html lang='en'><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>Penstock API</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 system-ui, sans-serif; margin: 4rem auto; max-width: 26rem; }}
input, button {{ font: inherit; padding: .4rem .6rem; }}
input {{ box-sizing: border-box; width: 100%; }}
button {{ margin-top: .8rem; }} #status {{ color: #b3261e; min-height: 1.6em; }}
@media (prefers-color-scheme: dark) {{ #status {{ color: #f2b8b5; }} }}
</style><script src='{SCRIPT_PATH}' defer></script></head><body>
<h1>Penstock</h1>
<p>This broker needs a token: the one that was created for you, or the static one in the file that
<code>token_file</code> names or in <code>PENSTOCK_TOKEN</code>. This tab keeps it until you close
it.</p>
<form id='sign-in'><label>Token
<input id='token' type='password' autocomplete='off' spellcheck='false' required autofocus></label>
<button>Open the documentation</button></form>
<p id='status' role='status'></p>
<noscript><p>Without JavaScript, fetch the page with the header
<code>Authorization: Bearer …</code> and open the file.</p></noscript></body></html>
"""

SCRIPT = """"use strict";
const KEY = "penstock-token";
let token = sessionStorage.getItem(KEY) || "";

function ask(path) {
  const headers = { Authorization: "Bearer " + token, Accept: "*/*" };
  return fetch(path, { headers, cache: "no-store", credentials: "omit", redirect: "error" });
}

function show(text) {
  document.getElementById("status").textContent = text;
}

function forget(text) {
  token = "";
  sessionStorage.removeItem(KEY);
  show(text);
}

async function open() {
  show("");
  let answer;
  try {
    answer = await ask("/docs");
  } catch (error) {
    show("The broker did not answer, or the token has characters that a header cannot carry.");
    return;
  }
  if (answer.status === 401) {
    forget("This is not the broker's token.");
    return;
  }
  if (!answer.ok) {
    show("The broker answered " + answer.status + ".");
    return;
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  sessionStorage.setItem(KEY, token);
  document.title = page.title;
  document.head.querySelector("style").replaceWith(...page.head.querySelectorAll("style"));
  document.body.replaceChildren(...page.body.childNodes);
  const there = location.hash && document.getElementById(location.hash.slice(1));
  if (there) there.scrollIntoView();
}

document.getElementById("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token = document.getElementById("token").value.trim();
  if (token) open();
});

// Links to the broker's documents need the token too.
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[href^='/']");
  if (!link || !token) return;
  event.preventDefault();
  const answer = await ask(link.getAttribute("href"));
  if (answer.ok) location.assign(URL.createObjectURL(await answer.blob()));
});

if (token) open();
"""
