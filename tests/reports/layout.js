// What is wrong with the layout of a page, by boxes: a list of texts, empty where all is well.
(() => {
  const problems = [], room = document.documentElement.clientWidth;
  const shown = (e) => e && e.getClientRects().length && getComputedStyle(e).visibility !== "hidden"
    && !e.closest(".hidden-text, .skip, .modebar, .hoverlayer, select, script, style, noscript");
  const told = (e) => `${e.tagName} ${(e.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40)}`;
  if (document.documentElement.scrollWidth > room) problems.push(`page: ${document.documentElement.scrollWidth} px of ${room}`);
  for (const e of document.querySelectorAll("header *, main *, footer *")) {
    if (!shown(e) || e.closest(".scroll *")) continue;
    const { left, right } = e.getBoundingClientRect();
    if (right > room + 1 || left < -1) problems.push(`outside: ${told(e)}`);
  }
  for (const box of document.querySelectorAll(".scroll")) {
    if (!shown(box) || box.scrollWidth <= box.clientWidth + 1) continue;
    const hint = box.nextElementSibling;
    if (!box.hasAttribute("data-more")) problems.push(`cut without a hint: ${told(box)}`);
    if (!box.closest("figure") && !(hint?.matches(".sideways") && shown(hint))) problems.push(`no words for what is cut: ${told(box)}`);
  }
  // Lines of text as boxes, cut where a box scrolls.
  const texts = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !shown(parent)) continue;
    const range = document.createRange(), clip = parent.closest(".scroll")?.getBoundingClientRect();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      let { left, right, top, bottom } = rect;
      if (clip) { left = Math.max(left, clip.left); right = Math.min(right, clip.right); top = Math.max(top, clip.top); bottom = Math.min(bottom, clip.bottom); }
      if (right - left > 1 && bottom - top > 1) texts.push({ left, right, top, bottom, parent, text: node.data.trim().slice(0, 30) });
    }
  }
  texts.sort((a, b) => a.top - b.top);
  for (const [place, a] of texts.entries())
    for (let next = place + 1; next < texts.length && texts[next].top < a.bottom; next++) {
      const b = texts[next];
      if ([a, b].every(({ parent }) => parent.matches("[transform*='rotate(']:not([transform*='rotate(0'])"))) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - b.top;
      if (wide > 2 && high > 0.35 * Math.min(a.bottom - a.top, b.bottom - b.top)) problems.push(`overlap: "${a.text}" and "${b.text}"`);
    }
  // A label of a line that another line strikes through, or on a point.
  for (const label of document.querySelectorAll(".shapelayer text, .annotation text")) {
    if (!shown(label) || !label.textContent) continue;
    const box = label.getBoundingClientRect(), plot = label.closest(".plot");
    for (const line of plot.querySelectorAll(".shapelayer path")) {
      const { left, right, top, bottom } = line.getBoundingClientRect();
      const flat = bottom - top < 2 && top > box.top + 2 && bottom < box.bottom - 2 && left < box.right && right > box.left;
      if (flat) problems.push(`struck through: ${label.textContent}`);
    }
    for (const point of plot.querySelectorAll("path.point")) {
      const { left, right, top, bottom } = point.getBoundingClientRect(), x = (left + right) / 2, y = (top + bottom) / 2;
      if (x > box.left && x < box.right && y > box.top + 2 && y < box.bottom - 2) problems.push(`on a point: ${label.textContent}`);
    }
  }
  return problems;
})()
