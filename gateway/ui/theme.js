// The color theme: the system's, or the one that the user chose. Not a module, so that it runs before the first paint.
(() => {
  const KEY = "pagestream.theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch { /* the browser blocks storage: the choice lasts until the page closes */ }

  function apply() {
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("themechange"));
  }

  document.addEventListener("click", (event) => {
    if (event.target.id !== "theme") return;
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, chosen);
    } catch { /* as above */ }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
})();
