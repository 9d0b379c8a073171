"use strict";
// Window of vispe paint: scribbles are stored in image pixels, and those of the image shown are sent after each change.

const token = document.querySelector("meta[name=token]").content;
const at = (path, more = "") => `${path}?token=${encodeURIComponent(token)}${more}`;
const find = (id) => document.getElementById(id);
const canvas = find("view"), pen = canvas.getContext("2d");

// identifier of this window for the server, so that one window does not overwrite the scribbles of another
const me = Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("-");
let revision = 0;
let state = null, shownImage = null, result = null, unsure = null, fractions = [];
let strokes = [], names = [], current = 1, tool = "brush", drawing = null, pieces = [], painting = false, pointer = null;
let view = { scale: 1, x: 0, y: 0 }, panning = null, space = false, showing = "labels";
const REFINING = "preview; refining ...";
let busy = false, again = false, saved = true, edits = 0;
// index of the image shown, undo and redo lists of the other images, and whether another image is being opened
let shown = 0, histories = {}, opening = false;

const color = (number) => `rgb(${state.palette[(number - 1) % state.palette.length].join(",")})`;

function say(text, error = false) {
  find("status").textContent = text;
  find("status").classList.toggle("error", error);
}

// another message that came meanwhile, such as that of saving, stays
function replaceMessage(before, text) { if (find("status").textContent === before) say(text); }

async function ask(path, content) {
  const sent = content === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content),
  };
  const answer = await fetch(at(path), sent);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

function load(source) {
  return new Promise((done, failed) => {
    const image = new Image();
    image.onload = () => done(image);
    image.onerror = () => failed(new Error("the image did not load. Is vispe paint still running?"));
    image.src = source;
  });
}

// --- drawing

function fit() {
  const { width, height } = canvas.getBoundingClientRect();
  view.scale = Math.min(width / state.width, height / state.height) * 0.96;
  view.x = (width - state.width * view.scale) / 2;
  view.y = (height - state.height * view.scale) / 2;
  draw();
}

function line(stroke, faint) {
  pen.strokeStyle = pen.fillStyle = color(stroke.class);
  pen.globalAlpha = faint ? 0.5 : 1;
  pen.lineWidth = stroke.width;
  pen.beginPath();
  // pixel centres have integer coordinates, but the canvas counts from the corner
  const [first, ...rest] = stroke.points;
  if (!rest.length) {
    pen.arc(first[0] + 0.5, first[1] + 0.5, stroke.width / 2, 0, 2 * Math.PI);
    pen.fill();
    return;
  }
  pen.moveTo(first[0] + 0.5, first[1] + 0.5);
  for (const [x, y] of rest) pen.lineTo(x + 0.5, y + 0.5);
  pen.stroke();
}

function draw() {
  if (!state) return;
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  pen.setTransform(ratio * view.scale, 0, 0, ratio * view.scale, ratio * view.x, ratio * view.y);
  pen.imageSmoothingEnabled = view.scale < 2;
  pen.drawImage(shownImage, 0, 0, state.width, state.height);
  const overlay = showing === "labels" ? result : showing === "uncertainty" ? unsure : null;
  if (overlay) {
    pen.globalAlpha = Number(find("opacity").value) / 100;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(overlay, 0, 0, state.width, state.height);
  }
  pen.lineCap = pen.lineJoin = "round";
  if (find("strokes-shown").checked) for (const stroke of strokes) line(stroke, false);
  for (const stroke of drawing ? [...pieces, drawing] : pieces) line(stroke, true);
  pen.globalAlpha = 1;
  if (pointer && !panning) {
    pen.lineWidth = 1.5 / view.scale;
    pen.strokeStyle = tool === "eraser" ? "#d55e00" : color(current);
    pen.beginPath();
    pen.arc(pointer[0] + 0.5, pointer[1] + 0.5, Math.max(Number(find("width").value) / 2, 2 / view.scale), 0, 7);
    pen.stroke();
  }
}

// --- scribbles

function changed() {
  saved = strokes.length === 0 && state.images.length === 1;
  edits += 1;
  refresh();
  draw();
  update();
}

const content = () => ({ names, strokes, image: shown, window: me, revision });

async function update() {
  if (busy || opening) { again = true; return; }
  busy = true;
  const number = shown;
  const computing = fractions.length ? "segmenting ..." : "computing features; the first time takes longest ...";
  say(computing);
  let preview = false;
  try {
    const found = await ask("/update", { ...content(), preview: true });
    revision = Math.max(revision, found.revision);
    if (number !== shown || opening) {
      // the result is that of another image
    } else if (found.ready) {
      preview = found.preview;
      await showResult(found, number);
      if (number === shown) replaceMessage(computing, preview ? REFINING : found.notes.join(" "));
    } else {
      result = unsure = null;
      fractions = [];
      say(found.why);
    }
  } catch (error) {
    say(error.message, true);
  }
  busy = false;
  document.body.dataset.version = String(Number(document.body.dataset.version || 0) + 1);
  refresh();
  draw();
  if (again && !opening) { again = false; update(); } else if (preview && !opening) refine(edits);
}

async function showResult(found, number) {
  const images = await Promise.all(
    ["labels", "uncertainty"].map((kind) => load(`data:image/png;base64,${found[kind]}`)));
  if (number !== shown) return;
  [result, unsure] = images;
  fractions = found.fractions;
}

// the final result replaces the preview, unless the scribbles changed
async function refine(edit) {
  const number = shown;
  try {
    const found = await ask("/update", content());
    if (edit !== edits || number !== shown || opening || !found.ready) return;
    await showResult(found, number);
    if (edit === edits && number === shown) replaceMessage(REFINING, found.notes.join(" "));
    document.body.dataset.refined = document.body.dataset.version;
    refresh();
    draw();
  } catch (error) { if (edit === edits && number === shown) say(error.message, true); }
}

// --- several images

async function openImage(number) {
  const isBusy = opening || painting || canvas.dataset.erased !== undefined;
  if (isBusy || number === shown || number < 0 || number >= state.images.length) {
    find("image").value = String(shown);
    return;
  }
  opening = true;
  try {
    say("opening the image ...");
    // scribbles that were not sent yet go with the request
    const next = await ask("/show", { ...content(), show: number });
    const image = await load(at("/image.png", `&image=${number}`));
    histories[shown] = { past, future };
    ({ past, future } = histories[number] || { past: [], future: [] });
    state = next;
    ({ strokes, names, revision } = next);
    shown = number;
    shownImage = image;
    result = unsure = null;
    fractions = [];
    describe();
    refresh();
    fit();
    say("");
  } catch (error) { say(error.message, true); }
  opening = false;
  find("image").value = String(shown);
  document.body.dataset.image = String(shown);
  again = false;
  update();
}

function describe() {
  document.title = `${state.title} - vispe paint`;
  const page = state.pages > 1 ? `, page ${state.page} (from 0) of ${state.pages}` : "";
  find("title").textContent = `${state.title}, ${state.width} x ${state.height} px${page}`;
  find("previous").disabled = shown === 0;
  find("next").disabled = shown === state.images.length - 1;
}

function listImages() {
  find("images").hidden = state.images.length === 1;
  find("image").replaceChildren(...state.images.map((name, i) => {
    const option = document.createElement("option");
    option.value = String(i);
    option.textContent = `${i + 1}/${state.images.length} ${name}`;
    return option;
  }));
  find("image").value = String(shown);
}

function erase(position) {
  const reach = Number(find("width").value) / 2;
  const near = (stroke) => stroke.points.some((point, i) => {
    const before = stroke.points[Math.max(i - 1, 0)];
    return distance(position, before, point) <= reach + stroke.width / 2;
  });
  const left = strokes.filter((stroke) => !near(stroke));
  if (left.length < strokes.length) { strokes = left; return true; }
  return false;
}

function distance([x, y], [ax, ay], [bx, by]) {
  const dx = bx - ax, dy = by - ay, length = dx * dx + dy * dy;
  const share = length ? Math.min(Math.max(((x - ax) * dx + (y - ay) * dy) / length, 0), 1) : 0;
  return Math.hypot(x - ax - share * dx, y - ay - share * dy);
}

let past = [], future = [];
function remember() { past.push(strokes.slice()); future = []; if (past.length > 500) past.shift(); }
function undo() { if (past.length && !opening) { future.push(strokes); strokes = past.pop(); changed(); } }
function redo() { if (future.length && !opening) { past.push(strokes); strokes = future.pop(); changed(); } }

// --- the panel

function refresh() {
  const list = find("classes");
  list.replaceChildren(...names.map((name, i) => {
    const item = document.createElement("li"), dot = document.createElement("button");
    const word = document.createElement("input"), share = document.createElement("span");
    item.setAttribute("aria-current", String(i + 1 === current));
    dot.className = "dot"; dot.type = "button";
    dot.style.background = color(i + 1);
    dot.title = `Paint ${name} (${i + 1})`;
    dot.onclick = () => choose(i + 1);
    word.value = name;
    word.setAttribute("aria-label", `Name of class ${i + 1}`);
    word.onfocus = () => { if (current !== i + 1) { current = i + 1; mark(); } };
    word.onkeydown = (event) => { if (event.key === "Enter") word.blur(); event.stopPropagation(); };
    word.onchange = () => rename(i, word.value.trim());
    share.textContent = fractions[i] === undefined ? "" : `${(100 * fractions[i]).toFixed(1)} %`;
    item.append(dot, word, share);
    return item;
  }));
  find("add").disabled = names.length >= state.most;
  find("undo").disabled = !past.length;
  find("redo").disabled = !future.length;
  find("files").textContent = saved ? "" : `not saved yet; folder: ${state.folder}`;
  find("width-shown").textContent = `${find("width").value} px`;
}

function mark() {
  [...find("classes").children].forEach((item, i) => item.setAttribute("aria-current", String(i + 1 === current)));
}
function choose(number) { if (number <= names.length) { current = number; use("brush"); mark(); draw(); } }
function rename(i, name) {
  if (opening) return refresh();
  if (!name || names.some((other, j) => j !== i && other === name)) {
    say(name ? `class ${name} already exists.` : "a class needs a name.", true);
    return refresh();
  }
  names[i] = name;
  changed();
}
function use(name) {
  tool = name;
  find("brush").setAttribute("aria-pressed", String(name === "brush"));
  find("eraser").setAttribute("aria-pressed", String(name === "eraser"));
  draw();
}
function show(name) {
  showing = showing === name ? "" : name;
  find("show-labels").setAttribute("aria-pressed", String(showing === "labels"));
  find("show-uncertainty").setAttribute("aria-pressed", String(showing === "uncertainty"));
  draw();
}
async function save() {
  if (opening) return;
  try {
    const sent = edits;
    const { files } = await ask("/save", content());
    saved = sent === edits;
    refresh();
    find("files").textContent = `${files.join(", ")} in ${state.folder}`;
    say(saved ? "saved." : "saved, except later changes.");
  } catch (error) { say(error.message, true); }
}

// --- mouse and keys

function positionOf(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left - view.x) / view.scale - 0.5, (event.clientY - box.top - view.y) / view.scale - 0.5];
}
const inside = ([x, y]) => x >= -0.5 && y >= -0.5 && x < state.width - 0.5 && y < state.height - 0.5;
function zoom(factor, x, y) {
  const scale = Math.min(Math.max(view.scale * factor, 0.02), 60);
  view.x = x - (x - view.x) * scale / view.scale;
  view.y = y - (y - view.y) * scale / view.scale;
  view.scale = scale;
  draw();
}

canvas.addEventListener("pointerdown", (event) => {
  if (!state || opening) return;
  canvas.focus();
  canvas.setPointerCapture(event.pointerId);
  if (event.button !== 0 || space) { panning = [event.clientX - view.x, event.clientY - view.y]; return; }
  const here = positionOf(event);
  if (tool === "eraser") { remember(); drawing = null; canvas.dataset.erased = String(erase(here)); draw(); return; }
  painting = true;
  if (inside(here)) drawing = { class: current, width: Number(find("width").value), points: [here], page: state.page };
  draw();
});
canvas.addEventListener("pointermove", (event) => {
  if (!state) return;
  pointer = positionOf(event);
  if (panning) {
    view.x = event.clientX - panning[0];
    view.y = event.clientY - panning[1];
  } else if (painting && !inside(pointer)) {
    // a scribble ends where it leaves the image, and a new one starts where it returns
    if (drawing) { pieces.push(drawing); drawing = null; }
  } else if (painting && !drawing) {
    drawing = { class: current, width: Number(find("width").value), points: [pointer], page: state.page };
  } else if (drawing) {
    const last = drawing.points[drawing.points.length - 1];
    if (Math.hypot(pointer[0] - last[0], pointer[1] - last[1]) * view.scale >= 1.5) drawing.points.push(pointer);
  } else if (tool === "eraser" && event.buttons === 1 && canvas.dataset.erased !== undefined) {
    if (erase(pointer)) canvas.dataset.erased = "true";
  }
  draw();
});
function released() {
  if (drawing) pieces.push(drawing);
  if (pieces.length) { remember(); strokes = [...strokes, ...pieces]; pieces = []; drawing = null; changed(); }
  painting = false;
  if (canvas.dataset.erased !== undefined) {
    if (canvas.dataset.erased === "true") changed(); else past.pop();
    delete canvas.dataset.erased;
  }
  panning = null;
  draw();
}
canvas.addEventListener("pointerup", released);
canvas.addEventListener("pointercancel", released);
canvas.addEventListener("pointerleave", () => { pointer = null; draw(); });
canvas.addEventListener("contextmenu", (event) => event.preventDefault());
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = canvas.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - box.left, event.clientY - box.top);
}, { passive: false });

const middle = () => { const box = canvas.getBoundingClientRect(); return [box.width / 2, box.height / 2]; };
const wider = (step) => {
  const width = find("width");
  width.value = String(Number(width.value) + step);
  refresh(); draw();
};
const keys = {
  b: () => use("brush"), e: () => use("eraser"), u: () => show("uncertainty"), z: undo, y: redo, s: save,
  h: () => { find("strokes-shown").checked = !find("strokes-shown").checked; draw(); },
  "[": () => wider(-1), "]": () => wider(1), "+": () => zoom(1.25, ...middle()), "=": () => zoom(1.25, ...middle()),
  "-": () => zoom(0.8, ...middle()), 0: fit,
  arrowleft: () => openImage(shown - 1), arrowright: () => openImage(shown + 1),
};
window.addEventListener("keydown", (event) => {
  if (!state || (event.target.tagName === "INPUT" && event.target.type === "text")) return;
  if (event.key === " " && (event.target === canvas || event.target === document.body)) {
    space = true;
    event.preventDefault();
    return;
  }
  const key = event.key.toLowerCase();
  // arrow keys of sliders and of the list of images keep their function
  const isControl = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (key.startsWith("arrow") && (isControl || state.images.length === 1)) return;
  if (event.altKey || ((event.ctrlKey || event.metaKey) && !["z", "y", "s"].includes(key))) return;
  if (/^[1-9]$/.test(key)) choose(Number(key));
  else if (key === "z" && event.shiftKey) redo();
  else if (keys[key]) keys[key]();
  else return;
  event.preventDefault();
});
window.addEventListener("keyup", (event) => { if (event.key === " ") space = false; });
window.addEventListener("resize", draw);
window.addEventListener("beforeunload", (event) => { if (!saved) event.preventDefault(); });

for (const [id, work] of Object.entries({
  brush: () => use("brush"), eraser: () => use("eraser"), undo, redo, save,
  "show-labels": () => show("labels"), "show-uncertainty": () => show("uncertainty"),
  add: () => { if (opening) return; names = [...names, freeName()]; current = names.length; changed(); },
})) find(id).addEventListener("click", work);
function freeName() {
  let number = names.length + 1;
  while (names.includes(`class ${number}`)) number += 1;
  return `class ${number}`;
}
find("image").addEventListener("change", (event) => { openImage(Number(event.target.value)); canvas.focus(); });
find("previous").addEventListener("click", () => openImage(shown - 1));
find("next").addEventListener("click", () => openImage(shown + 1));
for (const id of ["opacity", "strokes-shown"]) find(id).addEventListener("input", draw);
find("width").addEventListener("input", () => { refresh(); draw(); });

(async () => {
  try {
    say("loading ...");
    state = await ask("/state");
    names = state.names;
    strokes = state.strokes;
    revision = state.revision;
    saved = state.saved;
    shown = state.image;
    shownImage = await load(at("/image.png", `&image=${shown}`));
    describe();
    listImages();
    refresh();
    fit();
    say("Paint a scribble of each class.");
    document.body.dataset.ready = "yes";
    // scribbles on other images segment this one as well
    if (strokes.length || (state.images.length > 1 && revision)) update();
  } catch (error) { say(error.message, true); }
})();
