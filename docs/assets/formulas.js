// A formula is copied as its LaTeX, and whole, even if only a part of it is selected.
"use strict";

const formulaAround = node => (node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement).closest("math");

/** The selected range, with every formula that it cuts taken in whole. */
function withWholeFormulas(range) {
  const whole = range.cloneRange();
  const first = formulaAround(range.startContainer);
  const last = formulaAround(range.endContainer);
  if (first) whole.setStartBefore(first);
  if (last) whole.setEndAfter(last);
  return whole;
}

/** As it would be written in Markdown or LaTeX. */
function latexOf(formula) {
  const latex = formula.querySelector("annotation").textContent;
  return formula.getAttribute("display") === "block" ? `$$${latex}$$` : `$${latex}$`;
}

document.addEventListener("copy", event => {
  const selection = document.getSelection();
  if (selection.isCollapsed) return;
  const copied = document.createElement("div");
  copied.append(withWholeFormulas(selection.getRangeAt(0)).cloneContents());
  const formulas = copied.querySelectorAll("math");
  if (formulas.length === 0) return;
  event.clipboardData.setData("text/html", copied.innerHTML);
  for (const formula of formulas) formula.replaceWith(latexOf(formula));
  event.clipboardData.setData("text/plain", copied.textContent);
  event.preventDefault();
});
