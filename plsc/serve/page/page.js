"use strict";

const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "";
let model = null;
let images = []; // at most two files
let turn = 0; // of the latest request: answers to earlier ones are dropped

async function request(method, path, body, type) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (type) headers["Content-Type"] = type;
  let response;
  try {
    response = await fetch(path, { method, headers, body });
  } catch {
    throw new Error("The server does not answer.");
  }
  if (response.ok) return response;
  const about = await response.json().catch(() => ({}));
  const detail = typeof about.detail === "string" ? about.detail : `status ${response.status}`;
  if (response.status === 401) byId("login").hidden = false; // with the message, which must not follow a login
  throw new Error(`The server refused the request: ${detail}.`);
}

const get = async (path) => (await request("GET", path)).json();

function show(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

async function attempt(work, text = "") {
  show(text);
  try {
    await work();
    if (byId("status").textContent === text) show("");
  } catch (error) {
    show(error.message, true);
  }
}

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

async function fill(picture, path) {
  const blob = await (await request("GET", path)).blob();
  picture.src = URL.createObjectURL(blob);
  picture.onload = () => URL.revokeObjectURL(picture.src);
}

function card({ name, thumbnail, lines = [], id, source }) {
  const item = element("li");
  if (thumbnail) {
    const picture = element("img");
    picture.alt = "";
    fill(picture, thumbnail).catch(() => picture.replaceWith(element("div", "no picture", "none")));
    item.append(picture);
  } else {
    item.append(element("div", "no picture", "none"));
  }
  item.append(element("strong", name), ...lines.map((line) => element("span", line)));
  if (source === "enrolled") {
    const button = element("button", "Delete", "quiet");
    button.setAttribute("aria-label", `Delete ${name}, entry ${id}`);
    button.onclick = () => attempt(async () => {
      await request("DELETE", `entries/${id}`);
      await Promise.all([listEntries(), answer(), warn()]);
      show(`Deleted ${name}.`);
    });
    item.append(button);
  }
  return item;
}

async function choose(files) {
  const found = [...files].filter((file) => file.type.startsWith("image/")).slice(0, 2);
  if (!found.length) return show("Choose an image file.", true);
  images = [...images, ...found].slice(-2);
  drawChosen();
  await attempt(answer, images.length === 2 ? "Comparing." : "Searching.");
  if (!byId("answer").hidden) byId("verdict").focus();
}

function drawChosen() {
  byId("chosen").replaceChildren(...images.map((image, index) => {
    const item = element("li"), picture = element("img"), button = element("button", "Remove", "quiet");
    picture.src = URL.createObjectURL(image);
    picture.onload = () => URL.revokeObjectURL(picture.src);
    picture.alt = `Image ${index + 1}`;
    button.onclick = () => {
      images.splice(index, 1);
      drawChosen();
      attempt(answer);
    };
    item.append(picture, button);
    return item;
  }));
  byId("clear").hidden = !images.length;
}

const asDataUrl = (image) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(image);
});

async function answer() {
  const mine = ++turn;
  byId("answer").hidden = true;
  if (!images.length) return;
  const far = byId("far").value;
  const query = far ? `far=${far}` : "";
  if (images.length === 1) {
    const found = await (await request("POST", `search?k=10&${query}`, images[0], "application/octet-stream")).json();
    if (mine === turn) drawSearch(found);
  } else {
    const body = JSON.stringify({ images: await Promise.all(images.map(asDataUrl)) });
    const found = await (await request("POST", `compare?${query}`, body, "application/json")).json();
    if (mine === turn) drawComparison(found);
  }
}

const shown = (value) => value.toFixed(3);
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
const oneIn = (far) => `1 in ${Math.round(1 / far).toLocaleString("en")}`;

function draw(verdict, kind, meaning, results, isSearch) {
  byId("verdict").textContent = verdict;
  byId("verdict").className = kind;
  byId("meaning").textContent = meaning;
  byId("results").replaceChildren(...results);
  byId("enrol").hidden = !isSearch;
  byId("answer").hidden = false;
}

function drawSearch({ name, known, far, fpir, expected_fpir: expected, threshold, strangers, results }) {
  let verdict = results.length ? `Nearest: ${results[0].name}` : "There are no entries yet";
  let meaning = results.length ? "The model has no thresholds, so nothing is called unknown." : "Enrol an image to find it again.";
  if (results.length && known !== null) {
    const similarity = shown(results[0].similarity);
    verdict = known ? `Found: ${name}` : "Unknown";
    const ofPairs = fpir === null && !strangers ? ` Of pairs of different classes, about ${oneIn(far)} does (FAR ${far}).` : "";
    meaning = known
      ? `The similarity ${similarity} reaches the threshold ${shown(threshold)}.${ofPairs}`
      : `The nearest entry has similarity ${similarity}, below the threshold ${shown(threshold)}${fpir === null ? ` for FAR ${far}` : ""}.`;
    if (expected) meaning += ` ${sentence(expected.text)}`;
  }
  if (results.length && strangers) meaning += ` ${sentence(strangers.text)}`;
  const cards = results.map((one) => card({ ...one, lines: [shown(one.similarity), one.mapped ? `${one.source}, mapped` : one.source] }));
  draw(verdict, known === null ? "" : known ? "yes" : "no", meaning, cards, true);
}

function drawComparison({ similarity, same, far, threshold, lowest_accepted_far: lowest }) {
  const parts = [`Cosine similarity ${shown(similarity)}.`];
  if (same === null) parts.push("The model has no thresholds.");
  else if (same) parts.push(`It reaches the threshold ${shown(threshold)}. Of pairs of different classes, about ${oneIn(far)} does (FAR ${far}).`);
  else parts.push(`The threshold for FAR ${far} is ${shown(threshold)}.`);
  if (lowest !== null && lowest !== far) parts.push(`The lowest FAR at which they count as the same is ${lowest}.`);
  if (same === false && lowest === null) parts.push("They differ at every FAR of the model.");
  const verdict = same === null ? `Similarity ${shown(similarity)}` : same ? "The same" : "Different";
  draw(verdict, same === null ? "" : same ? "yes" : "no", parts.join(" "), [], false);
}

async function listEntries(after = 0) {
  const { entries, count } = await get(`entries?after=${after}&limit=50`);
  byId("count").textContent = count;
  if (!byId("enrolled").open) return;
  const cards = entries.map(({ id, name, enrolled }) =>
    card({ id, name, source: "enrolled", lines: [enrolled.slice(0, 10)], thumbnail: `entries/${id}/thumbnail` }));
  if (after) byId("entries").append(...cards);
  else byId("entries").replaceChildren(...cards);
  byId("more").hidden = byId("entries").children.length >= count || !entries.length;
  byId("more").onclick = () => attempt(() => listEntries(entries.at(-1).id));
}

async function warn() {
  const { warning } = await get("about");
  byId("warning").textContent = warning ? sentence(warning) : "";
}

async function start() {
  model = await get("about");
  await warn();
  byId("login").hidden = true;
  const accuracy = model.accuracy ? `; accuracy ${(100 * model.accuracy).toFixed(2)} % on its evaluation pairs` : "";
  byId("about").textContent = `A model with ${model.emb_size} values per embedding${accuracy}. ` +
    `It searches ${model.gallery.toLocaleString("en")} ${model.gallery_is_classes ? "classes" : "entries of a gallery"} and the enrolled entries.`;
  const fars = Object.keys(model.thresholds);
  const options = fars.map((far) => {
    const option = new Option(`FAR ${far} (similarity ${shown(model.thresholds[far])} or more)`, far);
    option.selected = Number(far) === model.far && model.fpir === null;
    return option;
  });
  if (model.fpir !== null) options.unshift(new Option(`Search: FPIR ${model.fpir} of the entries enrolled now; comparison: ${model.far === null ? "no threshold" : `FAR ${model.far}`}`, "", true, true));
  byId("far").replaceChildren(...options);
  byId("choice").hidden = !fars.length;
  await listEntries();
}

for (const id of ["files", "camera"]) {
  byId(id).onchange = async (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // the same file may be chosen again
    await choose(files);
  };
}
byId("clear").onclick = () => {
  images = [];
  drawChosen();
  attempt(answer);
  byId("files").focus();
};
byId("far").onchange = () => attempt(answer);
byId("enrolled").ontoggle = () => attempt(() => listEntries());
byId("enrol").onsubmit = (event) => {
  event.preventDefault();
  const name = byId("name").value;
  attempt(async () => {
    await request("POST", `entries?name=${encodeURIComponent(name)}`, images[0], "application/octet-stream");
    byId("name").value = "";
    await Promise.all([listEntries(), answer(), warn()]);
    show(`Enrolled ${name}.`);
  }, "Enrolling.");
};
byId("login").onsubmit = (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("key", key);
  attempt(start);
};
const drop = byId("drop");
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    if (name === "drop") choose(event.dataTransfer.files);
  });
}
attempt(start);
