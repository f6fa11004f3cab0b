"use strict";
// The parts that have changed come as events; where they stay away (a proxy may hold them back), the page asks.
const SILENT_MS = 6000, ASK_MS = 3000;
const heard = document.getElementById("heard"), filter = document.getElementById("filter");
let last = Date.now(), asking = false, log = "";

function show(parts) {
  last = Date.now();
  heard.textContent = "";
  for (const [id, html] of Object.entries(parts)) {
    const place = document.getElementById(id);
    if (place === null) { location.reload(); return; }
    const open = [...place.querySelectorAll("details")].map((each) => each.open);
    place.innerHTML = html;
    place.querySelectorAll("details").forEach((each, index) => { each.open = open[index]; });
    if (place.querySelector("#log")) { log = document.getElementById("log").textContent; sift(); }
  }
}

function sift() {
  if (document.getElementById("log") === null) return;
  const wanted = filter.value.toLowerCase();
  const lines = log.split("\n").filter((line) => line.toLowerCase().includes(wanted));
  document.getElementById("log").textContent = lines.join("\n");
}

function silent() {
  const seconds = Math.round((Date.now() - last) / 1000);
  if (seconds * 1000 >= SILENT_MS) heard.textContent = `No answer for ${seconds} s. Of a run that has ended, diloco dashboard shows the page again.`;
}

async function ask() {
  if (asking || Date.now() - last < SILENT_MS) return;
  asking = true;
  try {
    const answer = await fetch("state", { cache: "no-store" });
    if (answer.ok) show(await answer.json());
  } catch { silent(); } finally { asking = false; }
}

if (document.getElementById("log") !== null) {  // Not on a page that could not be made.
  document.getElementById("log").parentElement.open = true;
  log = document.getElementById("log").textContent;
}
filter.addEventListener("input", sift);
new EventSource("events").addEventListener("message", (event) => show(JSON.parse(event.data)));
setInterval(ask, ASK_MS);
setInterval(silent, 1000);
