"use strict";
// The page around the viewer: theme, figures, and which of the two views the address names.
// Data scripts call window.report.<function>(number, value); nothing here ever sets innerHTML.

window.report = {
  figures(_number, list) {
    report.drawn = list;
    draw();
  },
};

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(given) {
  const base = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, exponentformat: "e" };
  const out = Object.assign(base, given);
  if (typeof out.title === "string") out.title = { text: out.title, standoff: 8 };
  return out;
}

// A plot is drawn when it comes into sight: thirty at once would hold up the page for seconds.
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) plot(entry.target);
}, { rootMargin: "300px" });

function draw() {
  sight.disconnect();
  for (const figure of report.drawn || []) {
    const place = document.getElementById("fig-" + figure.id);
    if (!place) continue;
    place.figure = figure;
    place.style.minHeight = `${figure.layout.height || (figure.small ? 190 : 360)}px`;
    sight.observe(place);
  }
}

function plot(place) {
  sight.unobserve(place);
  const figure = place.figure;
  const layout = Object.assign(
    {
      height: figure.small ? 190 : 360,
      margin: figure.small ? { l: 44, r: 10, t: 8, b: 36 } : { l: 54, r: 14, t: 14, b: 48 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--text") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      legend: {
        orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal",
        font: { size: figure.small ? 10 : 12 }, itemwidth: 30,
      },
      showlegend: true,
    },
    figure.layout,
  );
  layout.xaxis = axis(figure.layout.xaxis);
  layout.yaxis = axis(figure.layout.yaxis);
  if (layout.showlegend) layout.margin = Object.assign({}, layout.margin, { t: 40 });
  Plotly.react(place, figure.data, layout, { displayModeBar: false, responsive: true });
}

// Plotly is 5 MB of script: it is loaded after the page stands, and only for the view that has plots.
let plotly = false;
function loadPlots() {
  if (plotly) return draw();
  plotly = true;
  const script = document.createElement("script");
  script.src = "plotly.min.js";
  script.onload = () => {
    const figures = document.createElement("script");
    figures.src = "data/figures.js";
    document.head.append(figures);
  };
  document.head.append(script);
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  draw();
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const next = dark ? "light" : "dark";
  try {
    localStorage.setItem("theme", next);
  } catch { /* a page from disk may have no storage: the choice then lasts until it is closed */ }
  theme(next);
});
try {
  theme(localStorage.getItem("theme"));
} catch { /* as above */ }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

function route() {
  const viewing = /^#t(\?|$)/.test(location.hash);
  const before = document.body.dataset.view;
  document.body.dataset.view = viewing ? "viewer" : "report";
  document.getElementById("report").hidden = viewing;
  document.getElementById("viewer").hidden = !viewing;
  if (viewing) window.viewer.open(new URLSearchParams(location.hash.slice(3)));
  else {
    loadPlots();
    if (!before) return;
    const target = document.getElementById(location.hash.slice(1));
    if (target) target.scrollIntoView();
  }
}
window.addEventListener("hashchange", route);
window.addEventListener("DOMContentLoaded", route);
