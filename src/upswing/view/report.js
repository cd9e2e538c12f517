"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const spoken = document.getElementById("spoken");

  // Theme: the system's, until the button is used.
  const stored = (() => { try { return localStorage.getItem("upswing-theme"); } catch { return null; } })();
  const system = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
  setTheme(stored ? stored === "dark" : system.matches);
  system.addEventListener("change", (event) => { if (!stored) setTheme(event.matches); });
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme !== "dark");
    try { localStorage.setItem("upswing-theme", root.dataset.theme); } catch { /* private window */ }
  });

  const showTip = (text, x, y, say) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
    if (say) spoken.textContent = text;
  };
  const hideTip = () => { tip.hidden = true; };
  const round = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

  // Charts: the nearest x under the pointer, or walked with the arrow keys.
  for (const svg of document.querySelectorAll("svg.chart")) {
    const data = JSON.parse(svg.dataset.chart);
    const make = (name, attributes) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      node.style.display = "none";
      svg.append(node);
      return node;
    };
    const cursor = make("line", { class: "cursor", y1: data.top, y2: data.bottom });
    const marks = data.series.map((_, index) => make("circle", { class: `dot s${index}`, r: 4 }));
    let current = -1;
    const show = (index, x, y, say) => {
      current = index;
      cursor.setAttribute("x1", data.px[index]);
      cursor.setAttribute("x2", data.px[index]);
      cursor.style.display = "";
      const lines = [`${data.label} ${round(data.x[index])}`];
      data.series.forEach((line, number) => {
        const found = line.py[index] !== null;
        marks[number].style.display = found ? "" : "none";
        if (!found) return;
        marks[number].setAttribute("cx", data.px[index]);
        marks[number].setAttribute("cy", line.py[index]);
        lines.push(`${line.name}: ${round(line.y[index])}`);
      });
      showTip(lines.join("\n"), x, y, say);
    };
    const hide = () => { hideTip(); for (const node of [cursor, ...marks]) node.style.display = "none"; };
    const scale = () => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    svg.addEventListener("pointermove", (event) => {
      const x = (event.clientX - svg.getBoundingClientRect().left) / scale();
      let best = 0;
      data.px.forEach((px, index) => { if (Math.abs(px - x) < Math.abs(data.px[best] - x)) best = index; });
      show(best, event.clientX, event.clientY, false);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const last = data.x.length - 1;
      const next = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined) return;
      event.preventDefault();
      const index = Math.max(0, Math.min(last, next));
      const box = svg.getBoundingClientRect();
      show(index, box.left + data.px[index] * scale(), box.top + 30, true);
    });
  }

  // Tokens: hovered, or walked with the arrow keys.
  const describe = (token) => {
    const [id, logprob, turn, version] = token.dataset.t.split("|");
    const sampled = token.closest(".run").classList.contains("sampled");
    const lines = [JSON.stringify(token.textContent), `token id ${id}`];
    if (sampled) lines.push("sampled by the agent", `engine log-prob ${logprob || "none (demonstration)"}`);
    else lines.push("prompt or tool text: not trained");
    lines.push(`turn ${turn}`);
    if (sampled && version !== "-1") lines.push(`policy version ${version}`);
    return lines.join("\n");
  };
  for (const stream of document.querySelectorAll("div.stream")) {
    let current = null;
    const leave = () => { if (current) current.classList.remove("current"); current = null; hideTip(); };
    stream.addEventListener("pointermove", (event) => {
      const token = event.target.closest(".t");
      if (token) showTip(describe(token), event.clientX, event.clientY, false); else hideTip();
    });
    stream.addEventListener("pointerleave", leave);
    stream.addEventListener("blur", leave);
    stream.addEventListener("keydown", (event) => {
      if (event.target !== stream) return;
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      const tokens = [...stream.querySelectorAll(".t")].filter((token) => token.getClientRects().length);
      if (!tokens.length) return;
      const at = current ? tokens.indexOf(current) + step : 0;
      if (current) current.classList.remove("current");
      current = tokens[Math.max(0, Math.min(tokens.length - 1, at))];
      current.classList.add("current");
      current.scrollIntoView({ block: "nearest" });
      const box = current.getBoundingClientRect();
      showTip(describe(current), box.left, box.bottom - 10, true);
    });
  }
})();
