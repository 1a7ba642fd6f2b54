// Requests to the server, with its API key where it demands one.

const KEY = "arclight-api-key"; // kept by this tab until it is closed

// fetch with the key that was given before, which asks nobody.
export async function peek(path) {
  const key = sessionStorage.getItem(KEY);
  return fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
}

// fetch that asks a person for the key when the server does, and then sends the request again.
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    const given = await askForKey(key !== null);
    if (given === null) return response;
    sessionStorage.setItem(KEY, given);
  }
}

function askForKey(wasWrong) {
  const dialog = document.getElementById("key-dialog"), field = document.getElementById("key");
  document.getElementById("key-trouble").hidden = !wasWrong;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    document.getElementById("key-cancel").onclick = () => dialog.close("");
    // a header takes printable ASCII only
    dialog.onclose = () => resolve(dialog.returnValue === "send" ? field.value.replace(/[^!-~]/g, "") : null);
  });
}
