"""What is run inside pages. A leaf."""

MAX_VALUE = 15_000  # characters of an evaluated value

KEEP = """globalThis.batchValue || (() => {
  const {stringify} = JSON, {isArray} = Array, {call} = Function.prototype, run = eval, asText = String, Inner = Node;
  const part = call.bind(String.prototype.slice), replace = call.bind(String.prototype.replace);
  const plain = (_, value) => typeof value === 'bigint' ? asText(value) : value;
  const value = async source => {
    let value = run(source);
    if (typeof value === 'function') value = value();
    value = await value;
    const kind = value === null ? 'null' : isArray(value) ? 'array' : typeof value;
    let text;
    try { text = stringify(value instanceof Inner ? value.outerHTML : value, plain); } catch { text = undefined; }
    if (text === undefined) text = value === undefined ? 'null' : stringify(asText(value));
    text = replace(text, /\\\\(?:u(d[89a-f]..)|.)/g, (escape, half) => half ? '\\ufffd' : escape);
    return `${kind} ${text.length} ${part(text, 0, LIMIT)}`;
  };
  Object.defineProperty(globalThis, 'batchValue', {value});
})()""".replace("LIMIT", str(MAX_VALUE))
"""Run before a page's own scripts: what EVALUATE needs is kept here, for these may replace all that there is."""

EVALUATE = f"source => {{ {KEEP}; return globalThis.batchValue(source); }}"
"""Evaluates an expression, calls it if it is a function, waits for its value -> the value's kind, the length of its
JSON text, and at most MAX_VALUE characters of that, with blanks between. What JSON has no form for is as JavaScript
writes it, half a surrogate pair, which would be an escape, U+FFFD."""

SCROLL = """down => {
  const by = (down ? 1 : -1) * 0.8 * innerHeight;
  const moves = place => {
    const before = place.scrollTop;
    place.scrollBy({top: by, behavior: 'instant'});
    return place.scrollTop !== before;
  };
  let place = document.scrollingElement || document.documentElement;
  if (!moves(place)) {
    let inner = document.elementFromPoint(innerWidth / 2, innerHeight / 2);
    while (inner && !moves(inner)) inner = inner.parentElement;
    place = inner || place;
  }
  return [Math.round(place.scrollTop), place.scrollHeight, place.clientHeight];
}"""
"""Scrolls the page, or what can be scrolled in its middle -> pixels above the view, of the whole, of the view."""

IMAGES = """([most, longest]) => {
  const found = [...document.images].filter(image => image.src && !image.src.startsWith('data:'));
  const short = text => String(text || '').slice(0, longest);
  return [found.length, found.slice(0, most).map(image => ({
    src: short(image.currentSrc || image.src), alt: short(image.alt),
    width: image.naturalWidth, height: image.naturalHeight}))];
}"""
"""-> how many pictures there are, and the first of them."""

OPTIONS = """element => element.tagName !== 'SELECT' ? null
  : [...element.options].slice(0, 500).map(option => [option.value, option.label.trim()])"""
"""A selection list -> values and labels of its options; null for anything else."""

DRAW = """marks => {
  const sheet = document.createElement('div');
  sheet.style.cssText = 'all:initial;position:fixed;inset:0;pointer-events:none;z-index:2147483647';
  sheet.setAttribute('data-batch-marks', '');
  const root = sheet.attachShadow({mode: 'closed'});
  for (const [ref, left, top, width, height] of marks) {
    const frame = document.createElement('div');
    frame.style.cssText = `position:fixed;left:${left}px;top:${top}px;width:${width}px;height:${height}px;`
      + 'box-sizing:border-box;border:2px solid #d0006f';
    const label = document.createElement('span');
    label.textContent = '@' + ref;
    label.style.cssText = `position:fixed;left:${Math.max(0, left)}px;top:${Math.max(0, top - 14)}px;`
      + 'font:bold 11px/14px monospace;color:#fff;background:#d0006f;padding:0 2px';
    root.append(frame, label);
  }
  document.documentElement.append(sheet);
}"""
"""Draws the refs over the page."""

ERASE = "() => document.querySelectorAll('[data-batch-marks]').forEach(sheet => sheet.remove())"
"""Undoes DRAW."""

HIDE = """frame => {
  frame.batchVisibility = [frame.style.getPropertyValue('visibility'), frame.style.getPropertyPriority('visibility')];
  frame.style.setProperty('visibility', 'hidden', 'important');
}"""
"""Hides a frame."""

UNHIDE = "frame => frame.style.setProperty('visibility', ...frame.batchVisibility)"
"""Undoes HIDE."""
