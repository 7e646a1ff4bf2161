// Short forms for the DOM.

export const $ = (id) => document.getElementById(id);

// element("b", { className: "name" }, "text", otherElement)
export function element(tag, properties = {}, ...children) {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
}

export function button(label, onClick, properties = {}) {
  const created = element("button", { type: "button", textContent: label, ...properties });
  created.addEventListener("click", onClick);
  return created;
}
