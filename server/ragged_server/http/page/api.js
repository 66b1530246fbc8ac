// The server's JSON, with the key of this tab.

const STORED = "ragged.key";
const PATIENCE_MS = 8000;

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `status ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) || "",
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

/** Return the JSON of a path; throws Refused, or TypeError and TimeoutError without an answer. */
export async function get(path) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  const answer = await fetch(path, {
    headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
  return answer.json();
}
