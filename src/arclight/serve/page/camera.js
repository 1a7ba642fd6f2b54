// A photo from the camera: the browser's own viewfinder where it may be used, else the phone's camera app.

export const TROUBLE = {
  NotAllowedError: "The browser was not allowed to use the camera. Allow it in the address bar, or choose a photo.",
  NotFoundError: "No camera was found. Choose a photo instead.",
};

export function offerCamera({ button, dialog, viewfinder, shutter, close, trouble, capture }, onPhoto) {
  const live = Boolean(navigator.mediaDevices?.getUserMedia);
  button.hidden = !live && !matchMedia("(pointer: coarse)").matches;
  let stream = null;

  async function open() {
    trouble.hidden = true;
    shutter.disabled = true;
    dialog.showModal();
    try {
      const wanted = { video: { facingMode: "environment", width: { ideal: 1920 } } };
      stream = await navigator.mediaDevices.getUserMedia(wanted);
      if (!dialog.open) return stop();
      viewfinder.srcObject = stream;
      await viewfinder.play();
      shutter.disabled = false;
    } catch (error) {
      trouble.textContent = TROUBLE[error.name] ?? "The camera did not start. Choose a photo instead.";
      trouble.hidden = false;
    }
  }

  function stop() {
    stream?.getTracks().forEach((track) => track.stop());
    stream = viewfinder.srcObject = null;
  }

  function take() {
    const picture = document.createElement("canvas");
    picture.width = viewfinder.videoWidth;
    picture.height = viewfinder.videoHeight;
    picture.getContext("2d").drawImage(viewfinder, 0, 0);
    dialog.close();
    picture.toBlob((blob) => onPhoto(blob), "image/jpeg", 0.92);
  }

  button.addEventListener("click", () => (live ? open() : capture.click()));
  shutter.addEventListener("click", take);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", stop);
}
