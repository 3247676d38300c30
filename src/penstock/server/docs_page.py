"""The page at /docs: the OpenAPI document for people, and the page that asks for the token first.

A browser sends no bearer token with a link. So the page that signs in fetches the documentation
with the token and replaces itself with it. Invariants: the documentation is self-contained, without
script, and every text is escaped. Neither the other page nor its script holds a secret, so both are
served without the token; its policy allows scripts of the broker only; the token is kept in the
sessionStorage of the tab and nowhere else.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import urlencode

import msgspec

SIGN_IN_SCRIPT_PATH = "/docs/sign-in.js"

SIGN_IN_PAGE_HEAD = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\n"
    b"referrer-policy: no-referrer\r\n"
    b"cache-control: no-store\r\n"
    b"vary: Accept, Authorization\r\n"
)

SIGN_IN_SCRIPT_HEAD = (
    b"content-type: text/javascript; charset=utf-8\r\n"
    b"x-content-type-options: nosniff\r\n"
    b"cache-control: no-cache\r\n"
)

SIGN_IN_PAGE = f"""<!doctype html><html lang='en'><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>Penstock API</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 system-ui, sans-serif; margin: 4rem auto; max-width: 26rem; }}
input, button {{ font: inherit; padding: .4rem .6rem; }}
input {{ box-sizing: border-box; width: 100%; }}
button {{ margin-top: .8rem; }} #status {{ color: #b3261e; min-height: 1.6em; }}
@media (prefers-color-scheme: dark) {{ #status {{ color: #f2b8b5; }} }}
</style><script src='{SIGN_IN_SCRIPT_PATH}' defer></script></head><body>
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

SIGN_IN_SCRIPT = """"use strict";
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


Json = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #0a6c74; }
@media (prefers-color-scheme: dark) { :root { --accent: #5cc8d0; } }
body { font: 16px/1.55 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1.5rem; }
h1 { margin: 0; } h1 small { font-size: 1rem; font-weight: normal; opacity: .7; }
h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; padding-bottom: .3rem; }
nav { columns: 20rem; font-size: .9rem; } nav a { display: block; overflow-wrap: anywhere; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
section { margin: 1.8rem 0; } h3 { font-size: 1.05rem; margin: 0 0 .3rem; }
h3 code { font-size: 1rem; } .method { color: var(--accent); font-weight: 700; }
pre { background: var(--soft); border-radius: 6px; overflow-x: auto; padding: .7rem .9rem; }
code, pre { font: .86rem/1.5 ui-monospace, monospace; } p { margin: .4rem 0; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
td { border-top: 1px solid var(--line); padding: .25rem .8rem .25rem 0; vertical-align: top;
  overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; width: 6rem; } summary { cursor: pointer; opacity: .8; }
details { margin: .4rem 0; }
"""

_TOKEN_HEADER = '"Authorization: Bearer $PENSTOCK_TOKEN"'
_UPGRADE = (
    "-i --http1.1 --max-time 1 -H 'Connection: Upgrade' -H 'Upgrade: websocket' "
    "-H 'Sec-WebSocket-Version: 13' -H 'Sec-WebSocket-Key: cGVuc3RvY2sgZXhhbXBsZQ==' "
    "-H 'Sec-WebSocket-Protocol: felix.v1'"
)
_NAMESPACE = "/v1/tenants/{tenant_id}/namespaces/{namespace}"


def render_page(document: Json, base_url: str, *, has_token: bool = False) -> str:
    """Returns the whole document as HTML; `base_url` is where the examples point. With `has_token`
    they send the token of the environment variable PENSTOCK_TOKEN."""
    curl = ["curl", "-H", _TOKEN_HEADER] if has_token else ["curl"]
    info = document["info"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        f"<p>{escape(info['description'])}</p>",
        "<p><a href='/docs/openapi.json'>openapi.json</a> · "
        "<a href='/docs/asyncapi.json'>asyncapi.json</a> (the WebSocket) · "
        "<a href='/metrics'>metrics</a></p>",
    ]
    for tag in document["tags"]:
        mine = [each for each in operations if tag["name"] in each[2]["tags"]]
        parts.append(f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p><nav>")
        parts += [_link(method, path, operation) for method, path, operation in mine]
        parts.append("</nav>")
        for method, path, operation in mine:
            parts += _section(document, method, path, operation, base_url, curl)
    parts.append("<h2>Errors</h2>")
    parts += _errors(document)
    parts.append("</body></html>")
    return "\n".join(parts)


def curl_of(
    method: str, path: str, operation: Json, base_url: str, curl: Sequence[str] = ("curl",)
) -> str:
    """Returns the operation's example as a command to paste, which begins with `curl`."""
    query: dict[str, Any] = {}
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            path = path.replace("{" + parameter["name"] + "}", parameter["example"])
        elif "example" in parameter:
            query[parameter["name"]] = parameter["example"]
    url = f"{base_url}{path}" + (f"?{urlencode(query)}" if query else "")
    is_endless = (
        operation["responses"].get("200", {}).get("content", {}).get("application/x-ndjson")
    )
    words = [*curl, "-sN" if is_endless else "-s"]
    if "101" in operation["responses"]:
        words.append(_UPGRADE)
    body = operation.get("requestBody")
    if method != ("GET" if body is None else "POST"):
        words += ["-X", method]
    words.append(shlex.quote(url))
    if body is None:
        return " ".join(words)
    example = msgspec.json.encode(body["content"]["application/json"]["example"]).decode()
    return " ".join(words) + f" \\\n  -d {shlex.quote(example)}"


def _link(method: str, path: str, operation: Json) -> str:
    anchor = escape(operation["operationId"], quote=True)
    return f"<a href='#{anchor}'><code>{method} {escape(_shortened(path))}</code></a>"


def _shortened(path: str) -> str:
    """Replaces the beginning that most paths share with an ellipsis."""
    below = path.removeprefix(_NAMESPACE)
    return f"…{below}" if below and below != path else path


def _section(
    document: Json, method: str, path: str, operation: Json, base_url: str, curl: Sequence[str]
) -> list[str]:
    anchor = escape(operation["operationId"], quote=True)
    parts = [
        f"<section id='{anchor}'><h3><span class='method'>{method}</span> "
        f"<code>{escape(path)}</code></h3>",
        f"<p><b>{escape(operation['summary'])}.</b> {escape(operation.get('description', ''))}</p>",
        f"<pre>{escape(curl_of(method, path, operation, base_url, curl))}</pre>",
    ]
    parts += _body(document, operation)
    parts += _parameters(operation)
    parts.append("<table>")
    for status, response in operation["responses"].items():
        if "$ref" not in response:
            parts.append(_row(status, response["description"], _example(response)))
    errors = {
        status: _name(response)
        for status, response in operation["responses"].items()
        if "$ref" in response
    }
    links = ", ".join(f"<a href='#error-{name}'>{status}</a>" for status, name in errors.items())
    parts.append(f"<tr><td>errors</td><td>{links}</td></tr></table></section>")
    return parts


def _body(document: Json, operation: Json) -> list[str]:
    """Returns a table of the JSON body's members, nested ones included."""
    if "requestBody" not in operation:
        return []
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    rows = _members(document, _first_shape(schema), "")
    if not rows:
        return []
    return ["<details><summary>JSON body</summary><table>", *rows, "</table></details>"]


def _first_shape(schema: Json) -> Json:
    """Returns the schema of a body, or of the items of a batch: the first alternative."""
    while "$ref" not in schema and ("anyOf" in schema or "items" in schema):
        schema = schema["anyOf"][0] if "anyOf" in schema else schema["items"]
    return schema


def _members(document: Json, schema: Json, prefix: str) -> list[str]:
    """Returns a row for each member. A schema without a name has none: its messages are described
    elsewhere."""
    if "$ref" not in schema:
        return []
    found = document["components"]["schemas"][_name(schema)]
    required = set(found.get("required", ()))
    rows = []
    for name, member in found["properties"].items():
        kinds = _kind(member) + (", required" if name in required else "")
        rows.append(_row(f"{prefix}{name}", f"{member.get('description', '')} ({kinds})".strip()))
        for kind in member.get("anyOf", [member]):
            rows += _members(document, kind, f"{prefix}{name}.")
            items = kind.get("items", {})
            for part in items.get("anyOf", [items]):
                rows += _members(document, part, f"{prefix}{name}[].")
    return rows


def _kind(member: Json) -> str:
    if "anyOf" in member:
        return " or ".join(_kind(kind) for kind in member["anyOf"] if kind.get("type") != "null")
    if "enum" in member:
        return " or ".join(map(str, member["enum"]))
    if member.get("type") == "array":
        return f"array of {_kind(member['items'])}"
    if member.get("contentEncoding"):
        return f"string in {member['contentEncoding']}"
    return str(member.get("type", "object"))


def _name(schema: Json) -> str:
    return str(schema["$ref"].rsplit("/", 1)[1])


def _parameters(operation: Json) -> list[str]:
    rows = []
    names: dict[str, set[str]] = {"path": set(), "query": set(), "header": set()}
    for parameter in operation.get("parameters", []):
        names[parameter["in"]].add(parameter["name"])
        kind = parameter["schema"]["type"] + (", required" if parameter.get("required") else "")
        rows.append(_row(parameter["name"], f"{parameter['description']} ({kind})"))
    if not rows:
        return []
    title = "Parameters"
    # A query with `raw` comes with a body, other queries replace it.
    if "requestBody" in operation and names["query"] and "raw" not in names["query"]:
        title = "Parameters, in the query if there is no body"
    return [f"<details><summary>{title}</summary><table>", *rows, "</table></details>"]


def _errors(document: Json) -> list[str]:
    parts = ["<table>"]
    for name, response in document["components"]["responses"].items():
        status = name.removeprefix("typed-")
        row = _row(status, response["description"], _example(response))
        parts.append(row.replace("<tr>", f"<tr id='error-{escape(name, quote=True)}'>", 1))
    return [*parts, "</table>"]


def _example(response: Json) -> str:
    for content in response.get("content", {}).values():
        return msgspec.json.encode(content["example"]).decode()
    return ""


def _row(name: str, text: str, example: str = "") -> str:
    shown = f"<br><code>{escape(example)}</code>" if example else ""
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}{shown}</td></tr>"
