// Checks of a page in the browser, for test_site.py. Each returns a list of what is wrong, as text.
const checks = (() => {
  const RAW_TEX = /\\\(|\\\)|\\\[|\\\]|\$\$|\\[a-zA-Z]{2,}|\$[^\s$]*[\\^_][^\s$]*\$/;
  const VERBATIM = "pre, code, script, style, textarea, mjx-container";

  const shown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const name = (element) => {
    const classes = [...element.classList].slice(0, 2).map((each) => "." + each).join("");
    return element.tagName.toLowerCase() + (element.id ? "#" + element.id : classes);
  };
  const texts = (root) => {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) if (walker.currentNode.textContent.trim()) found.push(walker.currentNode);
    return found;
  };

  // Formulae are set, and images are there.
  const settled = async () => {
    await window.MathJax?.startup?.promise;
    await document.fonts.ready;
    const images = [...document.images];
    images.forEach((image) => (image.loading = "eager"));
    await Promise.all(images.map((image) => image.decode().catch(() => null)));
  };

  const rawTex = () => [
    ...texts(document.body)
      .filter((text) => !text.parentElement.closest(VERBATIM) && RAW_TEX.test(text.textContent))
      .map((text) => text.textContent.trim().slice(0, 80)),
    ...[...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map((each) => each.textContent),
  ];

  const brokenImages = () =>
    [...document.images].filter((image) => !image.naturalWidth).map((image) => image.getAttribute("src"));

  const requestsElsewhere = () =>
    performance
      .getEntriesByType("resource")
      .map((entry) => entry.name)
      .filter((address) => /^(https?|ftp):/.test(address) && !address.startsWith(location.origin + "/"));

  // What reaches beyond the window, or is cut off, with no way to scroll to it.
  const overflow = () => {
    const page = document.scrollingElement;
    const wrong = page.scrollWidth > page.clientWidth ? [`${page.scrollWidth} > ${page.clientWidth}`] : [];
    // The theme scrolls the whole article; what is wide should scroll alone.
    const known = new Map([...document.querySelectorAll("article")].map((article) => [article, false]));
    const scrolls = (element) => {
      if (!known.has(element)) {
        const own = /auto|scroll/.test(getComputedStyle(element).overflowX);
        known.set(element, own || scrolls(element.parentElement));
      }
      return known.get(element);
    };
    const wide = new Set();
    for (const element of document.querySelectorAll("article *:not(pre *, svg *, mjx-container *)")) {
      if (!shown(element)) continue;
      const beyond = element.getBoundingClientRect().right - page.clientWidth;
      const around = element.parentElement;
      if (beyond > 1 && !scrolls(around) && (around.tagName === "ARTICLE" || !wide.has(around))) {
        wrong.push(`${beyond.toFixed()} beyond: ${name(element)}`);
      }
      if (beyond > 1) wide.add(element);
      const hides = /hidden|clip/.test(getComputedStyle(element).overflowX) && element.clientWidth > 1;
      if (hides && element.scrollWidth > element.clientWidth + 1) wrong.push("cut: " + name(element));
    }
    return wrong;
  };

  // Words of titles that stand on two lines.
  const splitWords = () => {
    const wrong = [];
    const titles = "article h1, article h2, article h3, .sidebar-brand-text, .header-center .brand, .sidebar-tree a";
    for (const title of document.querySelectorAll(titles)) {
      if (!shown(title)) continue;
      for (const text of texts(title)) {
        if (text.parentElement.closest("mjx-container")) continue;
        for (const word of text.textContent.matchAll(/[^\s\u00ad\u2010-\u2015-]+/g)) {
          const range = document.createRange();
          range.setStart(text, word.index);
          range.setEnd(text, word.index + word[0].length);
          const lines = new Set([...range.getClientRects()].filter((box) => box.width).map((box) => Math.round(box.top)));
          if (lines.size > 1) wrong.push(word[0]);
        }
      }
    }
    return [...new Set(wrong)];
  };

  // Colours as the screen shows them: [red, green, blue, alpha] of 0 to 1.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colours = new Map();
  const colour = (text) => {
    if (!colours.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      colours.set(text, [...canvas.getImageData(0, 0, 1, 1).data].map((each) => each / 255));
    }
    return colours.get(text);
  };
  const over = (top, below) => {
    const alpha = top[3];
    return [0, 1, 2].map((i) => alpha * top[i] + (1 - alpha) * below[i]).concat(1);
  };
  const background = (element, known) => {
    if (!element) return colour(getComputedStyle(document.body).backgroundColor);
    if (!known.has(element)) {
      const own = colour(getComputedStyle(element).backgroundColor);
      known.set(element, own[3] === 1 ? own : over(own, background(element.parentElement, known)));
    }
    return known.get(element);
  };
  // The WCAG's relative luminance and contrast ratio.
  const luminance = (rgb) =>
    [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
      const value = rgb[i] <= 0.04045 ? rgb[i] / 12.92 : ((rgb[i] + 0.055) / 1.055) ** 2.4;
      return sum + weight * value;
    }, 0);
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const contrast = () => {
    const known = new Map();
    const worst = new Map();
    const kinds = new Set();
    for (const text of texts(document.body)) {
      const element = text.parentElement;
      // The words of code are of few kinds.
      const kind = element.matches(".highlight pre > span") ? element.className : null;
      if (kind !== null && kinds.has(kind)) continue;
      kinds.add(kind);
      if (element.closest("script, style, noscript, template, mjx-assistive-mml, svg") || !shown(element)) continue;
      const box = element.getBoundingClientRect();
      if (box.width <= 1 || box.height <= 1) continue;
      const style = getComputedStyle(element);
      const behind = background(element, known);
      const value = ratio(over(colour(style.color), behind), behind);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      if (value < (large ? 3 : 4.5)) {
        const place = `${name(element.parentElement)} > ${name(element)}`;
        if (!worst.has(place) || worst.get(place)[0] > value) worst.set(place, [value, text.textContent.trim()]);
      }
    }
    return [...worst].map(([place, [value, text]]) => `${value.toFixed(2)} ${place}: ${text.slice(0, 30)}`);
  };

  // Figures are drawn with dark ink, so that they need something light behind them.
  const darkFigures = () => {
    const known = new Map();
    return [...document.querySelectorAll("article img")]
      .filter((image) => shown(image) && !image.closest(".only-dark, .dark-light"))
      .filter((image) => luminance(background(image, known)) < 0.8)
      .map((image) => image.getAttribute("src"));
  };

  return { settled, rawTex, brokenImages, requestsElsewhere, overflow, splitWords, contrast, darkFigures };
})();
