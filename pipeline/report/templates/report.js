"use strict";

// ---- colours: as the system has them, light, or dark

const THEMES = ["auto", "light", "dark"];
const WORDS = { auto: "as the system has them", light: "light", dark: "dark" };

function recall() {
  try { return localStorage.getItem("winnow-theme"); } catch { return null; } // a file: page may have no storage
}

function setTheme(theme) {
  const button = document.getElementById("theme");
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  button.textContent = `◐ ${theme[0].toUpperCase()}${theme.slice(1)}`;
  button.setAttribute("aria-label", `Colours: ${WORDS[theme]}`);
  button.dataset.now = theme;
  try { localStorage.setItem("winnow-theme", theme); } catch { /* then it lasts as long as the page */ }
}

function themes() {
  const before = recall();
  setTheme(THEMES.includes(before) ? before : "auto");
  document.getElementById("theme").addEventListener("click", (event) => {
    setTheme(THEMES[(THEMES.indexOf(event.currentTarget.dataset.now) + 1) % THEMES.length]);
  });
}

// ---- one sample in full

function openShot(button) {
  const about = JSON.parse(button.dataset.about);
  const dialog = document.getElementById("shot");
  dialog.querySelector(".large").replaceChildren(button.firstElementChild.cloneNode(true));
  dialog.querySelector("#shot-caption").textContent = about.caption || "(no caption)";
  const rows = Object.entries(about).filter(([key]) => key !== "caption").flatMap(([key, value]) => {
    const [term, fact] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = key;
    fact.textContent = value;
    return [term, fact];
  });
  dialog.querySelector("dl").replaceChildren(...rows);
  dialog.showModal();
}

function shots() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".shot button");
    if (button) openShot(button);
    if (event.target.id === "shot") event.target.close(); // its backdrop
  });
}

function figure(shot, note, mark) {
  const node = document.getElementById("shot-template").content.cloneNode(true).firstElementChild;
  const { src, tiny, value, bin, ...about } = shot;
  const button = node.querySelector("button");
  node.classList.add(mark);
  button.dataset.about = JSON.stringify(about);
  if (src) {
    const image = new Image();
    image.src = src;
    image.alt = about.caption || about.key;
    image.classList.toggle("tiny", tiny);
    button.append(image);
  } else {
    const text = document.createElement("span");
    text.className = "nopic";
    text.textContent = about.detail;
    button.append(text);
  }
  node.querySelector(".note").textContent = note;
  node.querySelector(".cap").textContent = about.caption || "(no caption)";
  return node;
}

// ---- scores: the cut moves, counts and pictures follow

const NEAR = 8; // pictures on each side of the cut

class Explorer {
  constructor(root) {
    this.root = root;
    this.data = JSON.parse(root.querySelector("script").textContent);
    this.input = root.querySelector("input");
    this.back = root.querySelector(".back");
    this.input.disabled = false;
    this.input.addEventListener("input", () => this.show());
    this.input.addEventListener("keydown", (event) => this.leap(event));
    this.back.addEventListener("click", () => this.reset());
    this.show();
  }

  get position() { return Number(this.input.value); }

  reset() {
    this.input.value = this.data.at;
    this.show();
    this.input.focus();
  }

  leap(event) { // browsers differ in what Page Up and Down do
    const step = { PageUp: 10, PageDown: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.input.value = this.position + step;
    this.show();
  }

  cutText() {
    const { edges } = this.data;
    const i = this.position;
    return i === 0 ? "none" : i > edges.length ? "above all" : String(Number(edges[i - 1].toPrecision(5)));
  }

  out(name, text) {
    const node = this.root.querySelector(`[data-out="${name}"]`);
    if (node) node.textContent = text;
  }

  show() {
    const { above, at, edges, filter } = this.data;
    const i = this.position;
    const [stay, total] = [above[i], above[0]];
    const share = total ? `${((100 * stay) / total).toFixed(1)} %` : "";
    this.out("cut", this.cutText());
    this.out("stay", stay.toLocaleString("en-US"));
    this.out("go", (total - stay).toLocaleString("en-US"));
    this.out("share", share);
    if (filter) this.override(i);
    this.input.setAttribute("aria-valuetext", `${this.cutText()}: ${stay.toLocaleString("en-US")} stay, ${share}`);
    this.root.querySelector(".plot").style.setProperty("--cut", `${(100 * i) / (above.length - 1)}%`);
    this.back.hidden = i === at;
    this.root.querySelector(".caution").hidden = !filter || i >= at;
    this.pictures(i);
  }

  override(i) { // what to tell jobs.curate for this cut; nothing for a cut that keeps all or none
    const { edges, filter } = this.data;
    const line = this.root.querySelector(".override");
    line.classList.toggle("hidden", i === 0 || i > edges.length);
    this.out("override", `filters.${filter}.threshold=${edges[i - 1]} filters.${filter}.top_fraction=null`);
  }

  pictures(position) {
    const { shots } = this.data;
    const first = shots.findIndex((s) => s.bin >= position);
    const split = first < 0 ? shots.length : first;
    this.strip(".side.go", shots.slice(Math.max(0, split - NEAR), split).reverse(), "go");
    this.strip(".side.stay", shots.slice(split, split + NEAR), "stay");
  }

  strip(side, chosen, mark) {
    const nodes = chosen.map((s) => figure(s, String(Number(s.value.toPrecision(4))), mark));
    if (!nodes.length) nodes.push(Object.assign(document.createElement("p"), { textContent: "none", className: "quiet" }));
    this.root.querySelector(`${side} .strip`).replaceChildren(...nodes);
  }
}

// ---- the navigation shows where the reader is

function follow() {
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const e of entries) seen[e.isIntersecting ? "add" : "delete"](e.target.id);
    const now = [...links.keys()].find((id) => seen.has(id));
    if (now) { // on a narrow screen the list itself scrolls
      const list = links.get(now).closest("nav");
      list.scrollTo({ left: links.get(now).offsetLeft - list.offsetLeft - 16 });
    }
    for (const [id, a] of links) {
      if (id === now) a.setAttribute("aria-current", "true");
      else a.removeAttribute("aria-current");
    }
  }, { rootMargin: "-20% 0px -60% 0px" });
  for (const section of document.querySelectorAll("main > section")) observer.observe(section);
}

themes();
shots();
for (const root of document.querySelectorAll(".explorer")) new Explorer(root);
follow();
