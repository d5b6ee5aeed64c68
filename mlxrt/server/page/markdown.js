// Markdown as DOM nodes. Text only ever becomes text nodes, so nothing a model writes is run as HTML.

const SAFE_LINK = /^(https?:|mailto:)/i;

export function renderMarkdown(source) {
  const out = document.createDocumentFragment();
  const lines = source.split("\n");
  let at = 0;
  while (at < lines.length) at = renderBlock(lines, at, out);
  return out;
}

function renderBlock(lines, at, out) {
  const line = lines[at];
  const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/);
  if (fence) return renderFence(lines, at, out, fence[1], fence[2]);
  if (!line.trim()) return at + 1;
  const heading = line.match(/^(#{1,6})\s+(.*)$/);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2); // the page's own headings come first
    out.append(fill(document.createElement("h" + level), heading[2]));
    return at + 1;
  }
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
    out.append(document.createElement("hr"));
    return at + 1;
  }
  if (/^\s*>/.test(line)) return renderQuote(lines, at, out);
  if (isItem(line)) return renderList(lines, at, out);
  if (line.includes("|") && /^[\s|:-]+$/.test(lines[at + 1] || "") && (lines[at + 1] || "").includes("-")) return renderTable(lines, at, out);
  return renderParagraph(lines, at, out);
}

function renderFence(lines, at, out, mark, language) {
  const body = [];
  for (at += 1; at < lines.length && !lines[at].trim().startsWith(mark); at += 1) body.push(lines[at]);
  const box = document.createElement("div");
  box.className = "code";
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // it scrolls, so the keyboard must reach it
  const code = document.createElement("code");
  if (language) code.dataset.language = language;
  code.textContent = body.join("\n");
  pre.append(code);
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy code");
  copy.addEventListener("click", () => copyText(code.textContent, copy));
  box.append(pre, copy);
  out.append(box);
  return at + 1;
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying is not allowed";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function renderQuote(lines, at, out) {
  const inner = [];
  while (at < lines.length && /^\s*>/.test(lines[at])) inner.push(lines[at++].replace(/^\s*>\s?/, ""));
  const quote = document.createElement("blockquote");
  quote.append(renderMarkdown(inner.join("\n")));
  out.append(quote);
  return at;
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const isItem = (line) => ITEM.test(line);

function renderList(lines, at, out) {
  const [, indent, mark] = lines[at].match(ITEM);
  const list = document.createElement(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) list.start = parseInt(mark, 10);
  while (at < lines.length) {
    const found = lines[at].match(ITEM);
    if (!found || found[1].length < indent.length) break;
    const inner = [found[3]];
    for (at += 1; at < lines.length; at += 1) {
      const next = lines[at].match(ITEM);
      if (next && next[1].length <= found[1].length) break;
      if (!next && !/^\s+\S/.test(lines[at]) && lines[at].trim()) break;
      if (!lines[at].trim() && !/^\s/.test(lines[at + 1] || "") && !isItem(lines[at + 1] || "")) break;
      inner.push(lines[at].replace(/^\s{1,4}/, ""));
    }
    const item = document.createElement("li");
    item.append(inner.length === 1 ? inline(inner[0]) : renderMarkdown(inner.join("\n")));
    list.append(item);
    while (at < lines.length && !lines[at].trim() && isItem(lines[at + 1] || "")) at += 1;
  }
  out.append(list);
  return at;
}

function renderTable(lines, at, out) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((c) => c.trim());
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of cells(lines[at])) head.append(fill(document.createElement("th"), text));
  const body = table.createTBody();
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) {
    const row = body.insertRow();
    for (const text of cells(lines[at])) row.append(fill(document.createElement("td"), text));
  }
  out.append(table);
  return at;
}

function renderParagraph(lines, at, out) {
  const text = [];
  while (at < lines.length && lines[at].trim() && !/^\s*(```|~~~|>|#{1,6}\s)/.test(lines[at]) && !(text.length && isItem(lines[at]))) text.push(lines[at++]);
  if (!text.length) text.push(lines[at++]);
  out.append(fill(document.createElement("p"), text.join("\n")));
  return at;
}

function fill(element, text) {
  element.append(inline(text));
  return element;
}

const INLINE = /(`+)([\s\S]+?)\1|\*\*([\s\S]+?)\*\*|__([\s\S]+?)__|\*([^*\s][^*]*?)\*|\[([^\]]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+)/;

function inline(text) {
  const out = document.createDocumentFragment();
  let found;
  while ((found = text.match(INLINE))) {
    appendText(out, text.slice(0, found.index));
    const [all, tick, code, bold, bold2, italic, label, url, bare] = found;
    if (tick) out.append(element("code", code));
    else if (bold ?? bold2) out.append(fill(document.createElement("strong"), bold ?? bold2));
    else if (italic) out.append(fill(document.createElement("em"), italic));
    else out.append(link(label ?? bare, url ?? bare));
    text = text.slice(found.index + all.length);
  }
  appendText(out, text);
  return out;
}

function appendText(out, text) {
  text.split("\n").forEach((part, i) => {
    if (i) out.append(document.createElement("br"));
    if (part) out.append(part);
  });
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function link(label, url) {
  if (!SAFE_LINK.test(url)) return document.createTextNode(label);
  const made = element("a", label);
  made.href = url;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}
