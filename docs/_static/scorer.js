// Ranks the results of the site's search. What pages say of themselves (their index entries and titles) stands first;
// where a word is only in the text, pages that explain stand before pages that record.
var Scorer = {
  score: ([page, , , , score, , kind]) =>
    kind !== "index" && /(^|\/)(experiments\/.*|architecture|benchmarks|changelog|contributing|upstream)$/.test(page) ? score / 10 : score,

  // The values of Sphinx, which has no others to fall back on.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
