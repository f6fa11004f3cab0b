// The same as raw_client.py in another language, with @grpc/grpc-js.
"use strict";
const grpc = require("@grpc/grpc-js");
const lines = require("node:readline").createInterface({ input: process.stdin });

const client = new grpc.Client(process.argv[2], grpc.credentials.createInsecure());
const same = (bytes) => bytes;

function made(ask) {
  return new Promise((resolve) => {
    const metadata = new grpc.Metadata();
    for (const [name, value] of ask.metadata) metadata.add(name, value);
    const options = { deadline: Date.now() + ask.seconds * 1000 };
    const call = client.makeBidiStreamRequest(ask.path, same, same, metadata, options);
    const replies = [];
    call.on("data", (reply) => {
      replies.push(reply.toString("hex"));
      if (ask.one) call.cancel();
    });
    call.on("error", () => {}); // The status says the same.
    call.on("status", ({ code, details }) => resolve({ code: grpc.status[code], details, replies }));
    for (const each of ask.messages) call.write(Buffer.from(each, "hex"));
    call.end();
  });
}

(async () => {
  for await (const line of lines) console.log(JSON.stringify(await made(JSON.parse(line))));
  client.close();
})();
