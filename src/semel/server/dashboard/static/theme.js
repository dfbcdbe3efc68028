// Before anything is drawn: the theme that was chosen, if one was.
(() => {
  const chosen = localStorage.getItem("semel-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
