// Makes the search work in pages opened from disk, where browsers do not allow workers.
// The script of a worker runs in a hidden frame instead.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
    const page = this.frame.contentDocument;
    page.open();
    page.write(
      `<body><script>postMessage = (data) => parent.postMessage({ worker: data }, "*")</script>` +
        `<script src="${new URL(url, location)}"></script>`,
    );
    page.close();
    addEventListener("message", ({ source, data }) => {
      if (source !== this.frame.contentWindow) return;
      const message = new MessageEvent("message", { data: data.worker });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    });
  }

  postMessage(data) {
    const message = new MessageEvent("message", { data });
    this.loaded.then(() => this.frame.contentWindow.dispatchEvent(message));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
