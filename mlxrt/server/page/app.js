// The page: conversations in the browser's storage, answers streamed from /v1/chat/completions.

import { copyText, renderMarkdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const STORE = "mlxrt.conversations";
const SETTINGS = "mlxrt.settings";

let conversations = load(STORE, []);
let current = conversations[0] ?? null;
let answering = null; // the AbortController of the answer that is running

function load(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(conversations.slice(0, 200)));
  } catch {
    status("The browser's storage is full: this conversation is not kept.");
  }
}

function status(text) {
  $("status").textContent = text;
}

// Settings, theme, models

function readSettings() {
  const found = { system: $("system").value };
  for (const name of NUMBERS) if ($(name).value !== "") found[name] = Number($(name).value);
  return found;
}

function restoreSettings() {
  const saved = load(SETTINGS, {});
  $("system").value = saved.system ?? "";
  for (const name of NUMBERS) $(name).value = saved[name] ?? "";
  $("api_key").value = sessionStorage.getItem("mlxrt.key") ?? "";
  if (saved.theme) document.documentElement.dataset.theme = saved.theme;
}

function saveSettings() {
  const theme = document.documentElement.dataset.theme;
  localStorage.setItem(SETTINGS, JSON.stringify({ ...readSettings(), ...(theme ? { theme } : {}) }));
  sessionStorage.setItem("mlxrt.key", $("api_key").value); // not kept beyond the tab
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  saveSettings();
}

function headers() {
  const key = $("api_key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function listModels() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error?.message ?? answer.statusText);
    $("model").replaceChildren(...body.data.map((model) => new Option(model.id, model.id)));
    if (current?.model) $("model").value = current.model;
  } catch (error) {
    status(`The models cannot be listed: ${error.message}`);
  }
}

// Conversations

function newConversation() {
  current = { id: crypto.randomUUID(), title: "New conversation", model: $("model").value, messages: [] };
  conversations.unshift(current);
  save();
  showAll();
  $("input").focus();
}

function removeConversation(id) {
  conversations = conversations.filter((c) => c.id !== id);
  if (current?.id === id) current = conversations[0] ?? null;
  save();
  showAll();
}

function showConversations() {
  $("conversations").replaceChildren(...conversations.map((conversation) => {
    const item = document.createElement("li");
    item.setAttribute("aria-current", String(conversation === current));
    const open = button(conversation.title, () => { stop(); current = conversation; showAll(); });
    const remove = button("×", () => removeConversation(conversation.id));
    remove.setAttribute("aria-label", `Delete ${conversation.title}`);
    item.append(open, remove);
    return item;
  }));
}

function showAll() {
  showConversations();
  const messages = current?.messages ?? [];
  $("log").replaceChildren(...messages.map((message, i) => showMessage(message, i)));
  scrollDown(true);
}

function button(text, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", action);
  return made;
}

// Messages

function showMessage(message, index) {
  const box = document.createElement("article");
  box.className = `message ${message.role}`;
  box.dataset.index = index;
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = message.role === "user" ? "You" : message.model ?? "Assistant";
  box.append(who);
  if (message.reasoning) box.append(showReasoning(message));
  const body = document.createElement("div");
  body.className = "body";
  if (message.role === "user") body.textContent = message.content;
  else body.append(renderMarkdown(message.content ?? ""));
  box.append(body);
  for (const call of message.tool_calls ?? []) box.append(showCall(call));
  if (message.error) box.append(line("error", message.error));
  box.append(showTools(message, index));
  return box;
}

function line(kind, text) {
  const made = document.createElement("div");
  made.className = kind;
  made.textContent = text;
  return made;
}

function showReasoning(message) {
  const details = document.createElement("details");
  details.className = "reasoning";
  details.open = Boolean(message.thinking);
  details.dataset.thinking = details.open;
  const summary = document.createElement("summary");
  summary.textContent = message.thinking ? "Thinking …" : "Thought";
  details.append(summary, line("text", message.reasoning));
  return details;
}

function showCall(call) {
  const details = document.createElement("details");
  details.className = "call";
  const summary = document.createElement("summary");
  summary.textContent = `Tool call: ${call.function.name}`;
  const pre = document.createElement("pre");
  pre.textContent = call.function.arguments;
  details.append(summary, pre);
  return details;
}

function showTools(message, index) {
  const tools = document.createElement("div");
  tools.className = "tools";
  if (message.role === "user") {
    tools.append(button("Edit", () => edit(index)));
  } else {
    const copy = button("Copy", () => copyText(message.content ?? "", copy));
    tools.append(copy, button("Regenerate", () => regenerate(index)));
    if (message.note) tools.append(message.note);
  }
  return tools;
}

function refresh(index) {
  const old = $("log").children[index];
  const made = showMessage(current.messages[index], index);
  const before = old?.querySelector("details.reasoning"), after = made.querySelector("details.reasoning");
  // As the reader left it; but when the thinking ends it folds.
  if (before && after && before.dataset.thinking === after.dataset.thinking) after.open = before.open;
  if (old) old.replaceWith(made);
  else $("log").append(made);
  scrollDown(false);
}

function scrollDown(force) {
  const log = $("log");
  if (force || log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function edit(index) {
  stop();
  $("input").value = current.messages[index].content;
  current.messages.splice(index);
  save();
  showAll();
  grow();
  $("input").focus();
}

function regenerate(index) {
  stop();
  current.messages.splice(index);
  save();
  showAll();
  answer();
}

// Answers

function send() {
  const text = $("input").value.trim();
  if (!text || answering) return;
  if (!current) newConversation();
  if (!current.messages.length) current.title = text.slice(0, 60);
  current.messages.push({ role: "user", content: text });
  $("input").value = "";
  grow();
  save();
  showAll();
  answer();
}

function stop() {
  answering?.abort();
}

function history(messages) {
  const system = $("system").value.trim();
  const past = messages.filter((m) => !(m.role === "assistant" && !m.content && !m.tool_calls)).map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...past] : past;
}

async function answer() {
  const conversation = current;
  const { system, ...options } = readSettings();
  const messages = history(conversation.messages);
  const message = { role: "assistant", content: "", model: $("model").value };
  conversation.model = $("model").value;
  conversation.messages.push(message);
  const index = conversation.messages.length - 1;
  const controller = (answering = new AbortController());
  setBusy(true);
  const show = throttle(() => { if (current === conversation) refresh(index); });
  const began = performance.now();
  let first = 0, count = 0;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: controller.signal,
      body: JSON.stringify({ model: message.model, messages, stream: true, stream_options: { include_usage: true }, ...options }),
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    for await (const chunk of readEvents(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        first ||= performance.now();
        count += 1;
      }
      apply(message, chunk, began, first);
      show();
      if (count % 20 === 0) status(`${(count / ((performance.now() - first) / 1000)).toFixed(1)} tokens/s`);
    }
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else message.error = error.message;
  }
  message.thinking = false;
  if (answering === controller) {
    answering = null;
    setBusy(false);
  }
  status("");
  save();
  if (current === conversation) refresh(index);
}

function apply(message, chunk, began, first) {
  const delta = chunk.choices[0]?.delta ?? {};
  if (delta.reasoning_content) {
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    message.thinking = true;
  }
  if (delta.content) {
    message.content += delta.content;
    message.thinking = false;
  }
  for (const call of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const known = (message.tool_calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } });
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  if (chunk.choices[0]?.finish_reason === "length") message.limit = true;
  if (chunk.usage) {
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
    const rate = completion_tokens > 1 ? (completion_tokens - 1) / ((performance.now() - first) / 1000) : 0;
    const parts = [`${completion_tokens} tokens`, `${rate.toFixed(1)} tokens/s`, `first after ${(first - began).toFixed(0)} ms`];
    parts.push(`prompt ${prompt_tokens}, ${prompt_tokens_details?.cached_tokens ?? 0} cached`);
    if (message.limit) parts.push("cut at the limit");
    message.note = parts.join(" · ");
  }
}

async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function throttle(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; action(); });
  };
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("input").addEventListener("input", grow);
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", () => { stop(); newConversation(); });
$("toggle-theme").addEventListener("click", toggleTheme);
$("settings").addEventListener("input", saveSettings);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("api_key").addEventListener("change", listModels);
for (const [id, panel] of [["toggle-settings", "settings"], ["toggle-sidebar", "sidebar"]]) {
  $(id).addEventListener("click", () => {
    $(panel).hidden = !$(panel).hidden;
    $(id).setAttribute("aria-expanded", String(!$(panel).hidden));
  });
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });

if (innerWidth < 720) {
  $("sidebar").hidden = true;
  $("toggle-sidebar").setAttribute("aria-expanded", "false");
}
restoreSettings();
showAll();
listModels();
