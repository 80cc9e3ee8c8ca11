"use strict";
// One trajectory as elements, turn by turn. Every text of a model, a question or a passage becomes a
// text node: append() of a string makes one.

(() => {
  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    for (const child of children.flat()) if (child != null) element.append(child);
    return element; // append() of a string makes a text node
  }

  function head(row, trajectory, others, close) {
    const back = h("button", { type: "button", class: "back" }, "‹ list");
    back.addEventListener("click", close);
    const facts = [row.dataset, row.id, `${trajectory.seconds.toFixed(1)} s`, `${trajectory.tokens.toLocaleString("en")} tokens read and written`];
    return [
      back,
      h("h1", {}, row.question),
      h("p", { class: "answer" },
        h("b", { class: row.right === "1" ? "good" : "bad" }, row.right === "1" ? "✓ " : "✗ "),
        row.answer == null ? h("i", {}, "no answer") : h("b", {}, row.answer),
        h("span", { class: "dim" }, "  accepted: "), trajectory.golds.join(" · ")),
      h("p", { class: "chips" }, chip(row.policy), chip(row.ending),
        row.right === "1" ? null : chip(row.cause),
        ...facts.map((fact) => h("span", { class: "dim" }, fact))),
      others.length ? h("p", { class: "others" }, "Same question: ", ...others.map(link)) : null,
    ].filter(Boolean);
  }

  function chip(text) { return h("span", { class: "chip" }, text); }

  function link(other) {
    const query = new URLSearchParams({ open: `${other.policy}~${other.id}` });
    const text = `${other.right === "1" ? "✓" : "✗"} ${other.policy}`;
    return h("a", { href: `#t?${query}`, class: other.right === "1" ? "chip good" : "chip bad" }, text);
  }

  function turn(turn, i, passageOf) {
    const t = turn.tokens;
    const named = { prompt: t.prompt, action: t.action, passages: t.observation, memory: t.memory };
    const parts = Object.entries(named).filter(([, n]) => n).map(([name, n]) => `${name} ${n}`);
    const seconds = Object.entries(turn.seconds).map(([name, value]) => `${name} ${value.toFixed(2)} s`);
    return h("section", { class: "turn" },
      h("h2", {}, `Turn ${i + 1}`, h("small", { title: "tokens" }, `${t.prompt + t.action + t.observation + t.memory} tokens: ${parts.join(" + ")}`)),
      turn.memory_before ? block("memory at the start", turn.memory_before, "memory") : null,
      turn.thinking ? block("thinking", turn.thinking, "thinking") : null,
      block("action", turn.action, "action"),
      turn.query != null ? h("div", { class: "query" }, h("span", { class: "label" }, "search"), h("b", {}, turn.query || "(empty)"),
        turn.bad_query ? chip("could not be used") : null) : null,
      ...turn.hits.map(([number, score], place) => passage(passageOf(number), score, place)),
      turn.memory_after != null ? memory(turn) : null,
      seconds.length ? h("p", { class: "dim small" }, seconds.join(" · ")) : null);
  }

  function block(label, text, kind) {
    return h("div", { class: `block ${kind}` }, h("span", { class: "label" }, label), h("div", { class: "text" }, text));
  }

  function passage([id, title, text], score, i) {
    return h("details", { class: "passage", ...(i < 3 ? { open: "" } : {}) },
      h("summary", {}, h("span", { class: "rank" }, String(i + 1)), h("b", {}, title || "(no title)"),
        h("small", { class: "dim" }, `${id} · ${score.toFixed(3)}`)),
      h("div", { class: "text" }, text));
  }

  function memory(turn) {
    const text = h("div", { class: "text" });
    for (const [kind, words] of difference(turn.memory_before, turn.memory_after)) {
      text.append(kind === "=" ? words : h(kind === "+" ? "ins" : "del", {}, words));
    }
    if (!turn.memory_after) text.append(h("i", { class: "dim" }, " (empty)"));
    return h("div", { class: "block memory" },
      h("span", { class: "label" }, "memory rewritten"), turn.memory_cut ? chip("cut at its limit") : null, text);
  }

  // Word by word, the longest common subsequence; memories hold about a thousand words at most.
  function difference(before, after) {
    const a = before.match(/\s*\S+/g) || [];
    const b = after.match(/\s*\S+/g) || [];
    if (a.length * b.length > 4e6) return [["-", before], ["+", after]];
    const same = (x, y) => x.trim() === y.trim();
    const width = b.length + 1;
    const longest = new Uint16Array((a.length + 1) * width);
    for (let i = a.length - 1; i >= 0; i--)
      for (let j = b.length - 1; j >= 0; j--)
        longest[i * width + j] = same(a[i], b[j])
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    const out = [];
    const put = (kind, word) => {
      if (out.length && out[out.length - 1][0] === kind) out[out.length - 1][1] += word;
      else out.push([kind, word]);
    };
    let i = 0;
    let j = 0;
    while (i < a.length || j < b.length) {
      if (i < a.length && j < b.length && same(a[i], b[j])) { put("=", b[j]); i++; j++; }
      else if (j >= b.length || (i < a.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) put("-", a[i++]);
      else put("+", b[j++]);
    }
    return out;
  }

  function ending(row) {
    return h("p", { class: "ending dim" }, `Ended: ${row.ending}.`);
  }

  window.reader = {
    h,
    // `passageOf(number)`: [id, title, text]; `others`: rows of the same question by other policies.
    render(row, trajectory, others, passageOf, close) {
      const turns = trajectory.turns.map((each, i) => turn(each, i, passageOf));
      return [...head(row, trajectory, others, close), ...turns, ending(row)];
    },
  };
})();
