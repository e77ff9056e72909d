// Times and sizes as pipeproof/diagnostics/units.py writes them; its tests compare both.

const TIME_UNITS = [["us", 1], ["ms", 1e3], ["s", 1e6]];
const SIZE_UNITS = ["B", "KiB", "MiB", "GiB"];

const trimmed = (value, digits) => String(Number(value.toFixed(digits)));

// So many digits after the point; a number halfway between two goes to the even one, as in Python.
function rounded(value, digits) {
  const text = value.toFixed(digits), [, rest = ""] = value.toFixed(60).split(".");
  const isHalfway = /^50*$/.test(rest.slice(digits));
  return isHalfway && Number(text.slice(-1)) % 2 ? (Number(text) - 10 ** -digits).toFixed(digits) : text;
}

function threeDigits(value) {
  if (value >= 999.5) return String(Number(value.toPrecision(3)));
  const power = Number(value.toExponential(2).split("e")[1]);
  const text = rounded(value, power < -4 ? 9 : 2 - power);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const unitOfTime = (us) => TIME_UNITS.find(([, length]) => Math.abs(us) < 999.5 * length) ?? TIME_UNITS.at(-1);

function duration(us) {
  const [unit, length] = unitOfTime(us);
  return `${us < 0 ? "-" : ""}${threeDigits(Math.abs(us) / length)} ${unit}`;
}

// A time on the axis, whose neighbours are `step` away: with as many digits as show the difference.
function tickText(us, step) {
  const [unit, length] = unitOfTime(step);
  return `${trimmed(us / length, 9)} ${unit}`;
}

function bytesText(bytes) {
  let power = 0;
  while (power < SIZE_UNITS.length - 1 && bytes >= 999.5 * 1024 ** power) power++;
  const value = bytes / 1024 ** power, digits = power === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value >= 999.5 ? threeDigits(value) : rounded(value, digits)} ${SIZE_UNITS[power]}`;
}
